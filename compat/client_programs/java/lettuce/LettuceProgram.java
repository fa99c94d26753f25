package clients;

import io.lettuce.core.ClientOptions;
import io.lettuce.core.KeyValue;
import io.lettuce.core.RedisClient;
import io.lettuce.core.RedisFuture;
import io.lettuce.core.RedisURI;
import io.lettuce.core.ScanArgs;
import io.lettuce.core.ScanIterator;
import io.lettuce.core.ScriptOutputType;
import io.lettuce.core.SetArgs;
import io.lettuce.core.SslOptions;
import io.lettuce.core.TrackingArgs;
import io.lettuce.core.api.StatefulRedisConnection;
import io.lettuce.core.api.sync.RedisCommands;
import io.lettuce.core.cluster.ClusterClientOptions;
import io.lettuce.core.cluster.ClusterTopologyRefreshOptions;
import io.lettuce.core.cluster.RedisClusterClient;
import io.lettuce.core.cluster.api.sync.RedisAdvancedClusterCommands;
import io.lettuce.core.cluster.models.partitions.RedisClusterNode;
import io.lettuce.core.cluster.pubsub.RedisClusterPubSubAdapter;
import io.lettuce.core.cluster.pubsub.StatefulRedisClusterPubSubConnection;
import io.lettuce.core.protocol.ProtocolVersion;
import io.lettuce.core.pubsub.RedisPubSubAdapter;
import io.lettuce.core.pubsub.StatefulRedisPubSubConnection;
import io.lettuce.core.support.caching.CacheAccessor;
import io.lettuce.core.support.caching.CacheFrontend;
import io.lettuce.core.support.caching.ClientSideCaching;
import java.io.File;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;

/** Lettuce: one connection for all threads, in both protocols; messages, client-side caching; the cluster client. */
public final class LettuceProgram {
    /** Of the slot of the key whose server ends. */
    private static final String CHANNEL = "own:{job:text:007}";

    public static void main(String[] arguments) throws Exception {
        if (Steps.PLACE.equals("cluster")) {
            cluster();
            return;
        }
        for (ProtocolVersion protocol : ProtocolVersion.values()) {
            RedisClient client = RedisClient.create(address());
            ClientOptions.Builder options = ClientOptions.builder().protocolVersion(protocol);
            if (Steps.CA != null) options.sslOptions(SslOptions.builder().trustManager(new File(Steps.CA)).build());
            client.setOptions(options.build());
            try (StatefulRedisConnection<String, String> connection = client.connect()) {
                texts(connection, protocol.name());
                if (!Steps.PLACE.equals("tls")) {
                    reads(connection.sync(), protocol.name());
                    changes(client, connection.sync(), protocol.name());
                    if (Steps.PLACE.equals("upstream")) writes(client, connection.sync(), protocol.name());
                    if (protocol == ProtocolVersion.RESP3) cache(connection);
                }
            } finally {
                client.shutdown(Duration.ZERO, Duration.ofSeconds(2));
            }
        }
    }

    private static RedisURI address() {
        RedisURI.Builder address = RedisURI.builder().withHost(Steps.HOST).withPort(Steps.PORT).withTimeout(Duration.ofSeconds(60));
        if (Steps.CA != null) address.withSsl(true).withAuthentication(Steps.USER, Steps.PASSWORD);
        return address.build();
    }

    private static void texts(StatefulRedisConnection<String, String> connection, String protocol) {
        RedisCommands<String, String> redis = connection.sync();
        Steps.step(protocol + " GET", () -> List.of(redis.get("job:text:007"), String.valueOf(redis.get("job:text:none"))));
        Steps.step(protocol + " MGET", () -> redis.mget("job:text:001", "job:text:none", "job:text:299"));
        Steps.step(protocol + " many at once", () -> {
            List<RedisFuture<String>> futures =
                    IntStream.range(0, Steps.TEXTS).mapToObj(each -> connection.async().get(Steps.text(each))).toList();
            List<String> found = new ArrayList<>();
            for (RedisFuture<String> each : futures) found.add(each.get(60, TimeUnit.SECONDS));
            return found;
        });
        Steps.step(protocol + " EXISTS, TYPE, TTL", () -> List.of(
                redis.exists("job:text:007"), redis.type("job:text:007"), redis.ttl("job:text:007")));
        Steps.step(protocol + " WRONGTYPE", () -> redis.hgetall("job:text:007"));
        Steps.step(protocol + " a key of others", () -> redis.hlen("job:map:flight"));
        if (!Steps.PLACE.equals("upstream")) {
            Steps.step(protocol + " a refused write", () -> redis.set("job:text:007", "x"));
            Steps.step(protocol + " a read after it", () -> redis.get("job:text:007"));
        }
    }

    private static void reads(RedisCommands<String, String> redis, String protocol) {
        Steps.step(protocol + " HGETALL", () -> Steps.sorted(redis.hgetall("job:map:flight")));
        Steps.step(protocol + " HSCAN", () -> {
            TreeSet<String> fields = new TreeSet<>();
            ScanIterator<KeyValue<String, String>> found = ScanIterator.hscan(redis, "job:map:large");
            found.forEachRemaining(each -> fields.add(each.getKey()));
            return fields.size();
        });
        Steps.step(protocol + " LRANGE", () -> redis.lrange("job:list:alerts", 0, -1));
        Steps.step(protocol + " SMEMBERS", () -> Steps.sorted(redis.smembers("job:set:airports")));
        Steps.step(protocol + " ZRANGE", () -> redis.zrangeWithScores("job:ranks:delays", 0, -1));
        Steps.step(protocol + " SCAN", () -> {
            TreeSet<String> keys = new TreeSet<>();
            ScanIterator.scan(redis, ScanArgs.Builder.matches("job:*").limit(1000)).forEachRemaining(keys::add);
            return keys;
        });
        Steps.step(protocol + " MULTI", () -> {
            redis.multi();
            redis.get("job:text:007");
            redis.hget("job:map:flight", "to");
            return redis.exec().stream().toList();
        });
    }

    private static void changes(RedisClient client, RedisCommands<String, String> redis, String protocol) {
        Steps.step(protocol + " WATCH", () -> {
            Steps.ask("put", "job:text:watched", "1");
            redis.watch("job:text:watched");
            redis.multi();
            redis.get("job:text:watched");
            Steps.ask("put", "job:text:watched", "2");
            return redis.exec().wasDiscarded();
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

    private static void writes(RedisClient client, RedisCommands<String, String> redis, String protocol) {
        Steps.step(protocol + " SET NX PX", () -> List.of(
                redis.set("own:lock", "me", SetArgs.Builder.nx().px(60_000)),
                String.valueOf(redis.set("own:lock", "you", SetArgs.Builder.nx().px(60_000))),
                redis.del("own:lock")));
        Steps.step(protocol + " hashes, lists, sorted sets", () -> List.of(
                redis.hset("own:map", Map.of("f", "v")),
                redis.rpush("own:list", "a", "b"),
                redis.blpop(1, "own:list"),
                redis.zadd("own:ranks", 1.5, "a"),
                redis.zrangeWithScores("own:ranks", 0, -1)));
        Steps.step(protocol + " MULTI of both", () -> {
            redis.multi();
            redis.incr("own:counter");
            redis.get("job:text:007");
            return redis.exec().stream().toList();
        });
        Steps.step(protocol + " a script", () -> redis.eval(
                "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])", ScriptOutputType.VALUE, new String[] {"own:text"}, "d"));
        Steps.step(protocol + " keys of both", () -> redis.mget("own:text", "job:text:007", "none"));
        Steps.step(protocol + " messages", () -> {
            try (Listener listener = new Listener(client, "own:channel")) {
                return List.of(redis.publish("own:channel", "hello"), listener.next());
            }
        });
        Steps.step(protocol + " DEL", () -> redis.del("own:text", "own:map", "own:ranks", "own:counter", "own:list"));
    }

    /** A local map holds values until the server invalidates them. */
    private static void cache(StatefulRedisConnection<String, String> connection) {
        Steps.step("client-side caching", () -> {
            Steps.ask("put", "job:text:live", "1");
            Map<String, String> local = new ConcurrentHashMap<>();
            CacheFrontend<String, String> cache =
                    ClientSideCaching.enable(CacheAccessor.forMap(local), connection, TrackingArgs.Builder.enabled());
            List<Object> found = new ArrayList<>(List.of(cache.get("job:text:live"), local));
            found.set(1, local.toString());
            Steps.ask("put", "job:text:live", "2");
            found.add(Steps.untilEqual(() -> cache.get("job:text:live"), "2"));
            return found;
        });
    }

    private static void cluster() throws Exception {
        RedisClusterClient client = RedisClusterClient.create(address());
        client.setOptions(ClusterClientOptions.builder()
                .topologyRefreshOptions(ClusterTopologyRefreshOptions.builder()
                        .enableAllAdaptiveRefreshTriggers()
                        .enablePeriodicRefresh(Duration.ofSeconds(1))
                        .build())
                .build());
        RedisAdvancedClusterCommands<String, String> redis = client.connect().sync();
        String[] keys = IntStream.range(0, Steps.TEXTS).mapToObj(Steps::text).toArray(String[]::new);
        Steps.step("MGET of all slots", () -> redis.mget(keys));
        Steps.step("a map", () -> Steps.sorted(redis.hgetall("job:map:flight")));
        BlockingQueue<String> messages = sharded(client);
        Steps.step("a message of a sharded channel", () -> List.of(redis.spublish(CHANNEL, "before"), String.valueOf(messages.poll(30, TimeUnit.SECONDS))));
        Steps.step("after a server's end", () -> {
            Steps.ask("kill", "job:text:007");
            return Steps.eventually(() -> redis.mget(keys), found -> found.stream().allMatch(KeyValue::hasValue));
        });
        Steps.step("a new value after it", () -> {
            Steps.ask("put", "job:text:live", "2");
            return Steps.untilEqual(() -> redis.get("job:text:live"), "2");
        });
        Steps.step("a sharded channel's subscription ends with its server", () -> {
            for (int each = 0; each < 300; each++) {
                redis.spublish(CHANNEL, "after");
                String message = messages.poll(100, TimeUnit.MILLISECONDS);
                if (message != null) return message;
            }
            return "no message for 30 s";
        });
        Steps.step("a new subscription", () -> {
            BlockingQueue<String> others = sharded(client);
            return List.of(redis.spublish(CHANNEL, "again"), String.valueOf(others.poll(30, TimeUnit.SECONDS)));
        });
        client.shutdown(Duration.ZERO, Duration.ofSeconds(2));
    }

    /** Return the messages of a sharded channel of the server that ends. */
    private static BlockingQueue<String> sharded(RedisClusterClient client) {
        BlockingQueue<String> messages = new ArrayBlockingQueue<>(1_000);
        StatefulRedisClusterPubSubConnection<String, String> connection = client.connectPubSub();
        connection.addListener(new RedisClusterPubSubAdapter<>() {
            @Override
            public void smessage(RedisClusterNode node, String channel, String message) {
                messages.add(message);
            }
        });
        connection.sync().ssubscribe(CHANNEL);
        return messages;
    }

    /** A connection that is subscribed to a channel. */
    private static final class Listener implements AutoCloseable {
        private final BlockingQueue<String> messages = new ArrayBlockingQueue<>(100);
        private final StatefulRedisPubSubConnection<String, String> connection;

        Listener(RedisClient client, String channel) {
            connection = client.connectPubSub();
            connection.addListener(new RedisPubSubAdapter<>() {
                @Override
                public void message(String channel, String message) {
                    messages.add(message);
                }
            });
            connection.sync().subscribe(channel);
        }

        String next() throws InterruptedException {
            return String.valueOf(messages.poll(30, TimeUnit.SECONDS));
        }

        @Override
        public void close() {
            connection.close();
        }
    }
}
