package clients;

import static redis.clients.jedis.params.SetParams.setParams;

import java.io.File;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import redis.clients.jedis.AbstractPipeline;
import redis.clients.jedis.AbstractTransaction;
import redis.clients.jedis.ConnectionPoolConfig;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.JedisPubSub;
import redis.clients.jedis.RedisClient;
import redis.clients.jedis.RedisClusterClient;
import redis.clients.jedis.Response;
import redis.clients.jedis.SslOptions;
import redis.clients.jedis.StreamEntryID;
import redis.clients.jedis.UnifiedJedis;
import redis.clients.jedis.csc.CacheConfig;
import redis.clients.jedis.params.ScanParams;
import redis.clients.jedis.params.XReadGroupParams;
import redis.clients.jedis.resps.ScanResult;

/** Jedis: the pooled client, pipelines, transactions, messages, the client-side cache; the cluster client. */
public final class JedisProgram {
    private static final HostAndPort ADDRESS = new HostAndPort(Steps.HOST, Steps.PORT);

    public static void main(String[] arguments) throws Exception {
        if (Steps.PLACE.equals("cluster")) {
            try (RedisClusterClient client = RedisClusterClient.create(ADDRESS)) {
                cluster(client);
            }
            return;
        }
        for (String protocol : List.of("RESP2", "RESP3")) {
            try (RedisClient client = client(protocol)) {
                texts(client, protocol);
                if (Steps.PLACE.equals("tls")) continue;
                reads(client, protocol);
                changes(client, protocol);
                if (Steps.PLACE.equals("upstream")) writes(client, protocol);
            }
        }
        if (!Steps.PLACE.equals("tls")) cache();
    }

    private static DefaultJedisClientConfig.Builder config(String protocol) {
        DefaultJedisClientConfig.Builder config = DefaultJedisClientConfig.builder().clientName("program");
        if (Steps.CA != null) {
            config.user(Steps.USER).password(Steps.PASSWORD).ssl(true);
            config.sslOptions(SslOptions.builder().truststore(TrustStore.of(new File(Steps.CA)), TrustStore.PASSWORD).build());
        }
        return protocol.equals("RESP2") ? config.resp2() : config.resp3();
    }

    private static RedisClient client(String protocol) {
        ConnectionPoolConfig pool = new ConnectionPoolConfig();
        pool.setMaxTotal(4);
        pool.setTestOnBorrow(true);
        return RedisClient.builder().hostAndPort(ADDRESS).clientConfig(config(protocol).build()).poolConfig(pool).build();
    }

    private static void texts(RedisClient client, String protocol) {
        Steps.step(protocol + " GET", () -> client.get("job:text:007"));
        Steps.step(protocol + " a missing key", () -> client.get("job:text:none"));
        Steps.step(protocol + " MGET", () -> client.mget("job:text:001", "job:text:none", "job:text:299"));
        Steps.step(protocol + " STRLEN", () -> client.strlen("job:text:long"));
        Steps.step(protocol + " a pipeline", () -> {
            List<Response<String>> found = new ArrayList<>();
            try (AbstractPipeline pipeline = client.pipelined()) {
                IntStream.range(0, Steps.TEXTS).forEach(each -> found.add(pipeline.get(Steps.text(each))));
            }
            return found.stream().map(Response::get).toList();
        });
        Steps.step(protocol + " EXISTS, TYPE, TTL", () -> List.of(
                client.exists("job:text:007"), client.type("job:text:007"), client.ttl("job:text:007")));
        Steps.step(protocol + " WRONGTYPE", () -> client.hgetAll("job:text:007"));
        Steps.step(protocol + " a key of others", () -> client.hgetAll("job:map:flight").size());
        if (!Steps.PLACE.equals("upstream")) {
            Steps.step(protocol + " a refused write", () -> client.set("job:text:007", "x"));
            Steps.step(protocol + " a read after it", () -> client.get("job:text:007"));
        }
    }

    private static void reads(RedisClient client, String protocol) {
        Steps.step(protocol + " HGETALL", () -> Steps.sorted(client.hgetAll("job:map:flight")));
        Steps.step(protocol + " HMGET", () -> client.hmget("job:map:flight", "to", "none"));
        Steps.step(protocol + " HSCAN", () -> {
            Set<Object> fields = new java.util.TreeSet<>();
            String cursor = ScanParams.SCAN_POINTER_START;
            do {
                ScanResult<Map.Entry<String, String>> found = client.hscan("job:map:large", cursor);
                found.getResult().forEach(each -> fields.add(each.getKey()));
                cursor = found.getCursor();
            } while (!cursor.equals(ScanParams.SCAN_POINTER_START));
            return fields.size();
        });
        Steps.step(protocol + " LRANGE", () -> client.lrange("job:list:alerts", 0, -1));
        Steps.step(protocol + " SMEMBERS", () -> Steps.sorted(client.smembers("job:set:airports")));
        Steps.step(protocol + " ZRANGE", () -> client.zrangeWithScores("job:ranks:delays", 0, -1));
        Steps.step(protocol + " ZSCORE", () -> client.zscore("job:ranks:delays", "PRG"));
        Steps.step(protocol + " SCAN", () -> {
            ScanParams pattern = new ScanParams().match("job:*").count(1000);
            Set<String> keys = new java.util.TreeSet<>();
            String cursor = ScanParams.SCAN_POINTER_START;
            do {
                ScanResult<String> found = client.scan(cursor, pattern);
                keys.addAll(found.getResult());
                cursor = found.getCursor();
            } while (!cursor.equals(ScanParams.SCAN_POINTER_START));
            return keys;
        });
        Steps.step(protocol + " MULTI", () -> {
            try (AbstractTransaction transaction = client.multi()) {
                transaction.get("job:text:007");
                transaction.hget("job:map:flight", "to");
                transaction.lrange("job:list:alerts", 0, 0);
                return transaction.exec();
            }
        });
    }

    /** What a client notices when a state changes: a watched key, a notification. */
    private static void changes(RedisClient client, String protocol) {
        Steps.step(protocol + " WATCH", () -> {
            Steps.ask("put", "job:text:watched", "1");
            List<Object> found = new ArrayList<>();
            for (boolean isChanged : new boolean[] {true, false}) {
                try (AbstractTransaction transaction = client.transaction(false)) {
                    transaction.watch("job:text:watched");
                    transaction.multi();
                    transaction.get("job:text:watched");
                    if (isChanged) Steps.ask("put", "job:text:watched", "2");
                    found.add(String.valueOf(transaction.exec()));
                }
            }
            return found;
        });
        Steps.step(protocol + " keyspace notifications", () -> {
            try (Listener listener = new Listener(client, "__keyspace@0__:job:text:live")) {
                Steps.ask("put", "job:text:live", "1");
                String set = listener.next();
                Steps.ask("delete", "job:text:live");
                return List.of(set, listener.next());
            }
        });
    }

    private static void writes(RedisClient client, String protocol) throws Exception {
        Steps.step(protocol + " SET, GET", () -> List.of(client.set("own:text", "a"), client.get("own:text")));
        Steps.step(protocol + " SET NX PX", () -> List.of(
                client.set("own:lock", "me", setParams().nx().px(60_000)),
                String.valueOf(client.set("own:lock", "you", setParams().nx().px(60_000))),
                client.pttl("own:lock") > 0,
                client.del("own:lock")));
        Steps.step(protocol + " hashes, lists, sets", () -> List.of(
                client.hset("own:map", Map.of("f", "v")),
                client.hincrBy("own:map", "n", 5),
                Steps.sorted(client.hgetAll("own:map")),
                client.rpush("own:list", "a", "b"),
                client.blpop(1, "own:list"),
                client.sadd("own:set", "x", "y"),
                client.zadd("own:ranks", Map.of("a", 1.5)),
                client.zrangeWithScores("own:ranks", 0, -1)));
        Steps.step(protocol + " keys of both", () -> client.mget("own:text", "job:text:007", "none"));
        Steps.step(protocol + " MULTI of both", () -> {
            try (AbstractTransaction transaction = client.multi()) {
                transaction.incr("own:counter");
                transaction.get("job:text:007");
                transaction.set("own:text", "b");
                return transaction.exec();
            }
        });
        Steps.step(protocol + " WATCH of one's own", () -> {
            try (AbstractTransaction transaction = client.transaction(false)) {
                transaction.watch("own:text");
                client.set("own:text", "c");
                transaction.multi();
                transaction.set("own:text", "lost");
                return transaction.exec() + " " + client.get("own:text");
            }
        });
        Steps.step(protocol + " a script", () -> client.eval(
                "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])", List.of("own:text"), List.of("d")));
        Steps.step(protocol + " a stream", () -> {
            client.xgroupCreate("own:stream", "group", new StreamEntryID(0), true);
            client.xadd("own:stream", new StreamEntryID(1, 1), Map.of("f", "v"));
            var found = client.xreadGroup("group", "me", new XReadGroupParams().count(5), Map.of("own:stream", StreamEntryID.XREADGROUP_UNDELIVERED_ENTRY));
            return List.of(found.get(0).getValue(), client.xack("own:stream", "group", new StreamEntryID(1, 1)), client.xlen("own:stream"));
        });
        Steps.step(protocol + " messages", () -> {
            try (Listener listener = new Listener(client, "own:channel")) {
                return List.of(client.publish("own:channel", "hello"), listener.next());
            }
        });
        Steps.step(protocol + " an expired key's notification", () -> {
            try (Listener listener = new Listener(client, "__keyevent@0__:expired")) {
                client.psetex("own:brief", 20, "x");
                return listener.next();
            }
        });
        Steps.step(protocol + " DEL", () -> client.del("own:text", "own:map", "own:set", "own:ranks", "own:stream", "own:counter", "own:list"));
    }

    /** The client-side cache reads a key once, until it changes. */
    private static void cache() throws Exception {
        Steps.step("client-side cache", () -> {
            Steps.ask("put", "job:text:live", "1");
            try (RedisClient client = RedisClient.builder().hostAndPort(ADDRESS).clientConfig(config("RESP3").build())
                    .cacheConfig(CacheConfig.builder().maxSize(100).build()).build()) {
                List<Object> found = new ArrayList<>(List.of(client.get("job:text:live"), client.get("job:text:live")));
                found.add(client.getCache().getStats().getHitCount());
                Steps.ask("put", "job:text:live", "2");
                found.add(Steps.untilEqual(() -> client.get("job:text:live"), "2"));
                return found;
            }
        });
    }

    private static void cluster(RedisClusterClient client) throws Exception {
        List<String> keys = IntStream.range(0, Steps.TEXTS).mapToObj(Steps::text).toList();
        Steps.step("GET", () -> keys.stream().map(client::get).toList());
        Steps.step("MGET of one slot", () -> client.mget("job:text:{a}", "job:text:{a}b"));
        Steps.step("MGET of several slots", () -> client.mget(keys.toArray(String[]::new)));
        Steps.step("a pipeline", () -> {
            List<Response<String>> found = new ArrayList<>();
            try (AbstractPipeline pipeline = client.pipelined()) {
                keys.forEach(each -> found.add(pipeline.get(each)));
            }
            return found.stream().map(Response::get).toList();
        });
        Steps.step("a map", () -> Steps.sorted(client.hgetAll("job:map:flight")));
        Steps.step("after a server's end", () -> {
            Steps.ask("kill", "job:text:007");
            return Steps.eventually(() -> keys.stream().map(client::get).toList(), found -> !found.contains(null));
        });
        Steps.step("a new value after it", () -> {
            Steps.ask("put", "job:text:live", "2");
            return Steps.untilEqual(() -> client.get("job:text:live"), "2");
        });
    }

    /** A thread that is subscribed to a channel, and keeps its messages. */
    private static final class Listener extends JedisPubSub implements AutoCloseable {
        private final BlockingQueue<String> messages = new ArrayBlockingQueue<>(100);
        private final Thread thread;

        Listener(UnifiedJedis client, String channel) throws InterruptedException {
            thread = new Thread(() -> client.subscribe(this, channel));
            thread.setDaemon(true);
            thread.start();
            next();
        }

        @Override
        public void onSubscribe(String channel, int subscriptions) {
            messages.add("subscribed");
        }

        @Override
        public void onMessage(String channel, String message) {
            messages.add(message);
        }

        String next() throws InterruptedException {
            return String.valueOf(messages.poll(30, TimeUnit.SECONDS));
        }

        @Override
        public void close() throws InterruptedException {
            unsubscribe();
            thread.join();
        }
    }
}
