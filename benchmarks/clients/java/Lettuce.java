import io.lettuce.core.KeyValue;
import io.lettuce.core.LettuceFutures;
import io.lettuce.core.RedisClient;
import io.lettuce.core.RedisFuture;
import io.lettuce.core.TransactionResult;
import io.lettuce.core.api.StatefulRedisConnection;
import io.lettuce.core.api.async.RedisAsyncCommands;
import io.lettuce.core.api.sync.RedisCommands;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.LongStream;

/**
 * Lettuce under load: {@code java Lettuce.java PORT PREFIX KEYS}. All tasks are threads that share one connection, but
 * for pipelines and transactions: those have a connection each, as Lettuce's manual asks.
 *
 * <p>Each line of the input is a workload, the number of its tasks, and seconds; the reply to it is a line of JSON.
 * benchmarks/clients/programs.py describes workloads and keys, which are the same for all clients.
 */
final class Lettuce {
    private static final int MANY_KEYS = 20;
    private static final int PIPELINED_KEYS = 100;
    private static final int FIELDS = 20;
    private static final int KEYS_OF_A_MAP = 10; // one map for so many keys
    private static final Duration PIPELINE_LIMIT = Duration.ofSeconds(10);

    private final RedisClient client;
    private final StatefulRedisConnection<String, String> shared;
    private final List<StatefulRedisConnection<String, String>> own = new ArrayList<>();
    private final ExecutorService threads = Executors.newCachedThreadPool();
    private final String prefix;
    private final long keys;
    private final AtomicLong last = new AtomicLong();

    Lettuce(int port, String prefix, long keys) {
        client = RedisClient.create("redis://127.0.0.1:" + port);
        shared = client.connect();
        this.prefix = prefix;
        this.keys = keys;
    }

    public static void main(String[] given) throws Exception {
        Lettuce program = new Lettuce(Integer.parseInt(given[0]), given[1], Long.parseLong(given[2]));
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ");
            System.out.println(program.measured(words[0], Integer.parseInt(words[1]), Double.parseDouble(words[2])));
        }
        System.exit(0);
    }

    /** Counts of a task, or of all; {@code error} is the text of one of the errors. */
    private static final class Outcome {
        long requests;
        long errors;
        long wrong;
        String error = "";

        void add(Outcome other) {
            requests += other.requests;
            errors += other.errors;
            wrong += other.wrong;
            error = other.error.isEmpty() ? error : other.error;
        }
    }

    /** Run a workload. The counter of optimistic transactions must have grown by their number. */
    private String measured(String workload, int tasks, double seconds) throws Exception {
        boolean hasOwn = List.of("pipeline", "transaction", "optimistic").contains(workload);
        while (hasOwn && own.size() < tasks) {
            own.add(client.connect());
        }
        boolean isOptimistic = workload.equals("optimistic");
        long before = isOptimistic ? counted() : 0;
        long began = System.nanoTime();
        long ends = began + (long) (seconds * 1e9);
        List<Future<Outcome>> running = new ArrayList<>();
        for (int task = 0; task < tasks; task++) {
            Callable<Boolean> call = call(workload, hasOwn ? own.get(task) : shared);
            running.add(threads.submit(() -> run(call, ends)));
        }
        Outcome total = new Outcome();
        for (Future<Outcome> each : running) {
            total.add(each.get());
        }
        double took = (System.nanoTime() - began) / 1e9;
        if (isOptimistic && counted() - before != total.requests - total.errors) {
            total.wrong++;
        }
        String text = "{\"requests\": %d, \"seconds\": %f, \"errors\": %d, \"wrong\": %d, \"error\": \"%s\"}";
        String error = total.error.replaceAll("[\"\\\\\\p{Cntrl}]", "'");
        return String.format(text, total.requests, took, total.errors, total.wrong, error);
    }

    private static Outcome run(Callable<Boolean> call, long ends) {
        Outcome found = new Outcome();
        while (found.requests == 0 || System.nanoTime() < ends) {
            found.requests++;
            try {
                found.wrong += call.call() ? 0 : 1;
            } catch (Exception error) {
                found.errors++;
                found.error = error.toString();
            }
        }
        return found;
    }

    /** Return what sends one request, or one pipeline or transaction, and returns whether its reply is right. */
    private Callable<Boolean> call(String workload, StatefulRedisConnection<String, String> connection) {
        RedisCommands<String, String> commands = connection.sync();
        return switch (workload) {
            case "get" -> () -> {
                long number = next();
                return commands.get(text(number)).equals(value(number));
            };
            case "mget" -> () -> {
                long number = next();
                List<KeyValue<String, String>> found = commands.mget(texts(number, MANY_KEYS));
                return areValues(found.stream().map(KeyValue::getValue).toList(), number, MANY_KEYS);
            };
            case "hgetall" -> () -> {
                long number = next() / KEYS_OF_A_MAP;
                var found = commands.hgetall(prefix + ":map:" + number);
                return found.size() == FIELDS && found.get("field:7").equals(number + ":7");
            };
            case "pipeline" -> () -> pipeline(connection);
            case "transaction" -> () -> {
                long number = next();
                commands.multi();
                commands.get(text(number));
                commands.get(text(number + 1));
                TransactionResult found = commands.exec();
                return areValues(found.stream().map(Object::toString).toList(), number, 2);
            };
            case "set" -> () -> {
                long number = next();
                return commands.set(prefix + ":written:" + number, value(number)).equals("OK");
            };
            case "optimistic" -> () -> {
                while (!increment(commands)) {}
                return true;
            };
            default -> throw new IllegalArgumentException("there is no workload " + workload);
        };
    }

    private boolean pipeline(StatefulRedisConnection<String, String> connection) {
        long number = next();
        RedisAsyncCommands<String, String> commands = connection.async();
        List<RedisFuture<String>> gets = new ArrayList<>();
        connection.setAutoFlushCommands(false);
        for (String key : texts(number, PIPELINED_KEYS)) {
            gets.add(commands.get(key));
        }
        connection.flushCommands();
        connection.setAutoFlushCommands(true);
        LettuceFutures.awaitAll(PIPELINE_LIMIT, gets.toArray(new RedisFuture[0]));
        return areValues(gets.stream().map(each -> each.toCompletableFuture().join()).toList(), number, PIPELINED_KEYS);
    }

    /** Add one in an optimistic transaction; false: another client has changed the key meanwhile. */
    private boolean increment(RedisCommands<String, String> commands) {
        commands.watch(counter());
        String number = commands.get(counter());
        commands.multi();
        commands.set(counter(), Long.toString(Long.parseLong(number == null ? "0" : number) + 1));
        return !commands.exec().wasDiscarded();
    }

    private long counted() {
        String number = shared.sync().get(counter());
        return Long.parseLong(number == null ? "0" : number);
    }

    private String counter() {
        return prefix + ":counter";
    }

    private long next() {
        return last.incrementAndGet() % keys;
    }

    private String text(long number) {
        return prefix + ":text:" + number % keys;
    }

    private String[] texts(long number, int count) {
        return LongStream.range(number, number + count).mapToObj(this::text).toArray(String[]::new);
    }

    private String value(long number) {
        return "value:" + number % keys;
    }

    private boolean areValues(List<String> found, long number, int count) {
        return found.equals(LongStream.range(number, number + count).mapToObj(this::value).toList());
    }
}
