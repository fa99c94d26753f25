package clients;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.util.Collection;
import java.util.Map;
import java.util.Objects;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.Callable;
import java.util.function.Predicate;

/** What all programs share: the address, the lines of their steps, and requests to the runner. */
final class Steps {
    static final String PLACE = System.getenv("PLACE");
    static final String HOST = System.getenv("REDIS_HOST");
    static final int PORT = Integer.parseInt(System.getenv("REDIS_PORT"));
    static final String USER = System.getenv("REDIS_USER");
    static final String PASSWORD = System.getenv("REDIS_PASSWORD");
    static final String CA = System.getenv("REDIS_CA");

    /** How many texts the states have: job:text:000 to job:text:299, each with its number. */
    static final int TEXTS = 300;

    /** Longer than any wait on a busy machine; it ends a hang. */
    private static final long WAIT_MS_MAX = 120_000;
    private static final BufferedReader ANSWERS = new BufferedReader(new InputStreamReader(System.in));

    private Steps() {}

    static String text(int number) {
        return "job:text:%03d".formatted(number);
    }

    /** Print what a step returns, or its error. */
    static void step(String name, Callable<?> body) {
        String result;
        try {
            result = String.valueOf(body.call());
        } catch (Throwable error) {
            result = errorText(error);
        }
        System.out.println(name + ": " + result.replace("\n", "\\n"));
    }

    /**
     * The kinds of an error and its causes, and the last one's text, without ports, without what Redisson adds about its
     * connection, and without the text of NOPERM, which differs by Redis' version.
     */
    static String errorText(Throwable error) {
        StringBuilder kinds = new StringBuilder(error.getClass().getSimpleName());
        Throwable last = error;
        for (; last.getCause() != null && last.getCause() != last; last = last.getCause()) {
            kinds.append(" < ").append(last.getCause().getClass().getSimpleName());
        }
        String text = String.valueOf(last.getMessage()).replaceAll("\\.* channel: (?s:.*)", "").replaceAll("NOPERM .*", "NOPERM");
        return kinds + ": " + text.replaceAll("(?<=127\\.0\\.0\\.1[:/])\\d+", "PORT");
    }

    /** Ask the runner to put or delete a state's key, or to kill the server that has a key; wait until it is done. */
    static void ask(String... words) throws IOException {
        System.out.println("! " + String.join(" ", words));
        System.out.flush();
        if (ANSWERS.readLine() == null) throw new IOException("the runner has ended");
    }

    /** Call until the result is right, and return it; errors meanwhile are no results. */
    static <T> T eventually(Callable<T> find, Predicate<T> isRight) throws Exception {
        long end = System.nanoTime() + WAIT_MS_MAX * 1_000_000;
        while (true) {
            Object found;
            try {
                T result = find.call();
                if (isRight.test(result)) return result;
                found = result;
            } catch (Exception error) {
                found = errorText(error);
            }
            if (System.nanoTime() > end) throw new IllegalStateException("still " + found);
            Thread.sleep(10);
        }
    }

    static <T> T untilEqual(Callable<T> find, T expected) throws Exception {
        return eventually(find, found -> Objects.equals(found, expected));
    }

    static Object sorted(Map<?, ?> map) {
        return new TreeMap<>(map);
    }

    static Object sorted(Collection<?> items) {
        return new TreeSet<>(items);
    }
}
