package clients;

import java.io.File;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.redisson.Redisson;
import org.redisson.api.RBatch;
import org.redisson.api.RBlockingQueue;
import org.redisson.api.RBucket;
import org.redisson.api.RLock;
import org.redisson.api.RMapCache;
import org.redisson.api.RRateLimiter;
import org.redisson.api.RScript;
import org.redisson.api.RTopic;
import org.redisson.api.RateType;
import org.redisson.api.RedissonClient;
import org.redisson.client.codec.StringCodec;
import org.redisson.config.Config;
import org.redisson.config.ReadMode;
import org.redisson.config.SingleServerConfig;

/** Redisson: buckets, maps, batches; locks, queues, a rate limiter, a topic, which are scripts and messages; the cluster client. */
public final class RedissonProgram {
    public static void main(String[] arguments) throws Exception {
        RedissonClient client = Redisson.create(config());
        try {
            texts(client);
            switch (Steps.PLACE) {
                case "cluster" -> ends(client);
                case "server" -> states(client);
                case "upstream" -> {
                    states(client);
                    writes(client);
                }
                default -> {}
            }
        } finally {
            client.shutdown(0, 2, TimeUnit.SECONDS);
        }
    }

    private static Config config() throws Exception {
        Config config = new Config().setCodec(StringCodec.INSTANCE);
        String address = Steps.HOST + ":" + Steps.PORT;
        if (Steps.PLACE.equals("cluster")) {
            config.useClusterServers().addNodeAddress("redis://" + address).setScanInterval(1_000).setReadMode(ReadMode.MASTER);
            return config;
        }
        SingleServerConfig server = config.useSingleServer()
                .setAddress((Steps.CA == null ? "redis://" : "rediss://") + address)
                .setConnectionMinimumIdleSize(2)
                .setConnectionPoolSize(8)
                .setTimeout(30_000);
        if (Steps.CA != null) {
            server.setUsername(Steps.USER).setPassword(Steps.PASSWORD);
            server.setSslTruststore(TrustStore.of(new File(Steps.CA)).toURI().toURL());
            server.setSslTruststorePassword(new String(TrustStore.PASSWORD));
        }
        return config;
    }

    private static void texts(RedissonClient client) {
        Steps.step("a bucket", () -> client.getBucket("job:text:007").get());
        Steps.step("a missing key", () -> client.getBucket("job:text:none").get());
        Steps.step("buckets", () -> Steps.sorted(client.getBuckets().get("job:text:001", "job:text:none", "job:text:299")));
        Steps.step("WRONGTYPE", () -> client.getMap("job:text:007").readAllMap());
        Steps.step("a batch", () -> batch(client));
        Steps.step("a map", () -> Steps.sorted(client.<String, String>getMap("job:map:flight").readAllMap()));
        if (List.of("server", "tls").contains(Steps.PLACE)) {
            Steps.step("a refused write", () -> {
                client.getBucket("job:text:007").set("x");
                return "written";
            });
            Steps.step("a read after it", () -> client.getBucket("job:text:007").get());
        }
    }

    /** Read all texts in one batch. */
    private static List<?> batch(RedissonClient client) {
        RBatch batch = client.createBatch();
        IntStream.range(0, Steps.TEXTS).forEach(each -> batch.getBucket(Steps.text(each)).getAsync());
        return batch.execute().getResponses();
    }

    private static void states(RedissonClient client) {
        Steps.step("a map's keys, scanned", () -> {
            List<Object> found = new ArrayList<>();
            client.getMap("job:map:large").keySet().forEach(found::add);
            return found.stream().distinct().count();
        });
        Steps.step("a list", () -> client.getList("job:list:alerts").readAll());
        Steps.step("a set", () -> Steps.sorted(client.getSet("job:set:airports").readAll()));
        Steps.step("a sorted set", () -> client.getScoredSortedSet("job:ranks:delays").entryRange(0, -1).toString());
        Steps.step("keys by a pattern", () -> client.getKeys().getKeysStreamByPattern("job:list:*").toList());
    }

    private static void ends(RedissonClient client) {
        Steps.step("after a server's end", () -> {
            List<?> expected = batch(client);
            Steps.ask("kill", "job:text:007");
            return Steps.<Object>untilEqual(() -> batch(client), expected);
        });
        Steps.step("a new value after it", () -> {
            Steps.ask("put", "job:text:live", "2");
            return Steps.<Object>untilEqual(() -> client.getBucket("job:text:live").get(), "2");
        });
    }

    private static void writes(RedissonClient client) {
        Steps.step("a bucket of one's own", () -> {
            RBucket<String> bucket = client.getBucket("own:text");
            bucket.set("a", Duration.ofMinutes(1));
            return List.of(bucket.get(), bucket.compareAndSet("a", "b"), bucket.getAndDelete());
        });
        Steps.step("a lock", () -> {
            RLock lock = client.getLock("own:lock");
            List<Object> found = new ArrayList<>(List.of(lock.tryLock(1, 60, TimeUnit.SECONDS), lock.isHeldByCurrentThread()));
            Thread other = new Thread(() -> found.add(lock.tryLock()));
            other.start();
            other.join();
            lock.unlock();
            found.add(lock.isLocked());
            return found;
        });
        Steps.step("a waiting lock gets it", () -> {
            RLock lock = client.getLock("own:lock");
            lock.lock();
            BlockingQueue<Object> found = new ArrayBlockingQueue<>(1);
            Thread other = new Thread(() -> {
                lock.lock();
                found.add("locked");
                lock.unlock();
            });
            other.start();
            lock.unlock();
            return found.poll(30, TimeUnit.SECONDS);
        });
        Steps.step("a map with expiry", () -> {
            RMapCache<String, String> map = client.getMapCache("own:cache");
            map.put("f", "v", 1, TimeUnit.MINUTES);
            return List.of(map.get("f"), map.putIfAbsent("f", "w"), map.size(), map.delete());
        });
        Steps.step("a blocking queue", () -> {
            RBlockingQueue<String> queue = client.getBlockingQueue("own:queue");
            queue.add("a");
            return List.of(queue.poll(1, TimeUnit.SECONDS), String.valueOf(queue.poll(100, TimeUnit.MILLISECONDS)));
        });
        Steps.step("a rate limiter", () -> {
            RRateLimiter limiter = client.getRateLimiter("own:limiter");
            limiter.trySetRate(RateType.OVERALL, 2, Duration.ofHours(1));
            return List.of(limiter.tryAcquire(), limiter.tryAcquire(), limiter.tryAcquire(), limiter.delete());
        });
        Steps.step("a topic", () -> {
            BlockingQueue<String> messages = new ArrayBlockingQueue<>(10);
            RTopic topic = client.getTopic("own:topic");
            topic.addListener(String.class, (channel, message) -> messages.add(message));
            return List.of(topic.publish("hello"), String.valueOf(messages.poll(30, TimeUnit.SECONDS)));
        });
        Steps.step("a script", () -> {
            try {
                return client.getScript().eval(
                        RScript.Mode.READ_WRITE, "return redis.call('INCR', KEYS[1])", RScript.ReturnType.VALUE, List.of("own:n"));
            } finally {
                client.getKeys().delete("own:n");
            }
        });
        Steps.step("an atomic counter", () -> {
            var counter = client.getAtomicLong("own:counter");
            return List.of(counter.addAndGet(41), counter.incrementAndGet(), counter.delete());
        });
    }
}
