package clients;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.WebApplicationType;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.boot.data.redis.health.DataRedisHealthIndicator;
import org.springframework.cache.Cache;
import org.springframework.cache.annotation.Cacheable;
import org.springframework.cache.annotation.CacheEvict;
import org.springframework.cache.annotation.EnableCaching;
import org.springframework.context.ConfigurableApplicationContext;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.context.event.EventListener;
import org.springframework.data.annotation.Id;
import org.springframework.data.redis.cache.RedisCacheConfiguration;
import org.springframework.data.redis.cache.RedisCacheManager;
import org.springframework.data.redis.connection.RedisConnectionFactory;
import org.springframework.data.redis.connection.stream.Consumer;
import org.springframework.data.redis.connection.stream.MapRecord;
import org.springframework.data.redis.connection.stream.ReadOffset;
import org.springframework.data.redis.connection.stream.StreamOffset;
import org.springframework.data.redis.core.RedisHash;
import org.springframework.data.redis.core.RedisKeyExpiredEvent;
import org.springframework.data.redis.core.RedisKeyValueAdapter.EnableKeyspaceEvents;
import org.springframework.data.redis.core.SessionCallback;
import org.springframework.data.redis.core.RedisOperations;
import org.springframework.data.redis.core.StringRedisTemplate;
import org.springframework.data.redis.core.TimeToLive;
import org.springframework.data.redis.core.index.Indexed;
import org.springframework.data.redis.core.script.RedisScript;
import org.springframework.data.redis.listener.ChannelTopic;
import org.springframework.data.redis.listener.RedisMessageListenerContainer;
import org.springframework.data.redis.repository.configuration.EnableRedisRepositories;
import org.springframework.data.redis.serializer.RedisSerializationContext.SerializationPair;
import org.springframework.data.redis.serializer.RedisSerializer;
import org.springframework.data.redis.stream.StreamMessageListenerContainer;
import org.springframework.data.redis.stream.StreamMessageListenerContainer.StreamMessageListenerContainerOptions;
import org.springframework.data.repository.CrudRepository;
import org.springframework.session.FindByIndexNameSessionRepository;
import org.springframework.session.Session;
import org.springframework.session.data.redis.config.annotation.web.http.EnableRedisIndexedHttpSession;
import org.springframework.session.events.SessionCreatedEvent;
import org.springframework.session.events.SessionDeletedEvent;
import org.springframework.session.events.SessionExpiredEvent;

/** Spring Boot: the template, the cache, repositories, sessions with events, listener and stream containers. */
public final class SpringProgram {
    /** Kinds of events, in their order. */
    private static final BlockingQueue<String> EVENTS = new ArrayBlockingQueue<>(100);

    public static void main(String[] arguments) {
        if (Steps.PLACE.equals("cluster")) {
            cluster();
            return;
        }
        for (String driver : List.of("lettuce", "jedis")) {
            try (ConfigurableApplicationContext context = started(driver)) {
                System.out.println(driver + " start: done");
                StringRedisTemplate template = context.getBean(StringRedisTemplate.class);
                values(driver, template);
                if (!Steps.PLACE.equals("tls")) states(driver, template);
                if (Steps.PLACE.equals("server")) cachedStates(driver, template);
                if (Steps.PLACE.equals("upstream")) writes(driver, context);
            } catch (Exception error) {
                System.out.println(driver + " start: " + Steps.errorText(error));
            }
        }
    }

    private static ConfigurableApplicationContext started(String driver) {
        SpringApplication application = Steps.PLACE.equals("upstream")
                ? new SpringApplication(Application.class, Writing.class)
                : new SpringApplication(Application.class);
        application.setWebApplicationType(WebApplicationType.NONE);
        application.setDefaultProperties(settings(driver));
        return application.run();
    }

    /** Both drivers' clients are connected when a server ends. */
    private static void cluster() {
        try (ConfigurableApplicationContext lettuce = started("lettuce");
                ConfigurableApplicationContext jedis = started("jedis")) {
            Map<String, StringRedisTemplate> templates = new TreeMap<>(Map.of(
                    "lettuce", lettuce.getBean(StringRedisTemplate.class), "jedis", jedis.getBean(StringRedisTemplate.class)));
            templates.forEach(SpringProgram::values);
            templates.forEach(SpringProgram::health);
            List<String> keys = IntStream.range(0, Steps.TEXTS).mapToObj(Steps::text).toList();
            List<String> expected = templates.get("jedis").opsForValue().multiGet(keys);
            Steps.step("a server's end", () -> {
                Steps.ask("kill", "job:text:007");
                return expected;
            });
            templates.forEach((driver, template) -> {
                Steps.step(driver + " after it", () -> Steps.untilEqual(() -> template.opsForValue().multiGet(keys), expected));
                Steps.step(driver + " a new value after it", () -> {
                    Steps.ask("put", "job:text:live", driver);
                    return Steps.untilEqual(() -> template.opsForValue().get("job:text:live"), driver);
                });
            });
        }
    }

    private static Map<String, Object> settings(String driver) {
        Map<String, Object> settings = new HashMap<>(Map.of(
                "spring.data.redis.client-type", driver,
                "spring.cache.type", "redis",
                "spring.main.banner-mode", "off",
                "spring.main.log-startup-info", false,
                "logging.level.root", "OFF"));
        if (Steps.PLACE.equals("cluster")) {
            settings.put("spring.data.redis.cluster.nodes", Steps.HOST + ":" + Steps.PORT);
            settings.put("spring.data.redis.timeout", "5s"); // of Lettuce's requests to a node that has ended; the default is a minute
            settings.put("spring.data.redis.lettuce.cluster.refresh.adaptive", true);
            settings.put("spring.data.redis.lettuce.cluster.refresh.period", "1s");
        } else {
            settings.put("spring.data.redis.host", Steps.HOST);
            settings.put("spring.data.redis.port", Steps.PORT);
        }
        if (Steps.CA != null) {
            settings.put("spring.data.redis.username", Steps.USER);
            settings.put("spring.data.redis.password", Steps.PASSWORD);
            settings.put("spring.data.redis.ssl.bundle", "redis");
            settings.put("spring.ssl.bundle.pem.redis.truststore.certificate", "file:" + Steps.CA);
        }
        return settings;
    }

    private static void values(String driver, StringRedisTemplate template) {
        Steps.step(driver + " values", () -> template.opsForValue().multiGet(List.of("job:text:007", "job:text:none", "job:text:299")));
        Steps.step(driver + " a hash", () -> Steps.sorted(template.opsForHash().entries("job:map:flight")));
        Steps.step(driver + " WRONGTYPE", () -> template.opsForHash().entries("job:text:007"));
        if (List.of("server", "tls").contains(Steps.PLACE)) {
            Steps.step(driver + " a refused write", () -> {
                template.opsForValue().set("job:text:007", "x");
                return "written";
            });
            Steps.step(driver + " a read after it", () -> template.opsForValue().get("job:text:007"));
        }
    }

    /** The health endpoint's part for Redis. */
    private static void health(String driver, StringRedisTemplate template) {
        RedisConnectionFactory connections = template.getRequiredConnectionFactory();
        Steps.step(driver + " health", () -> new DataRedisHealthIndicator(connections).health().getStatus());
    }

    /** Spring's cache over states: keys have no prefix, and values are texts. Over Lettuce a put does not wait for its reply. */
    private static void cachedStates(String driver, StringRedisTemplate template) {
        RedisCacheConfiguration texts = RedisCacheConfiguration.defaultCacheConfig()
                .disableKeyPrefix()
                .serializeValuesWith(SerializationPair.fromSerializer(RedisSerializer.string()));
        Cache cache = RedisCacheManager.builder(template.getRequiredConnectionFactory()).cacheDefaults(texts).build().getCache("states");
        Steps.step(driver + " states by the cache", () -> Arrays.asList(
                cache.get("job:text:007", String.class), cache.get("job:text:none", String.class)));
        Steps.step(driver + " a refused write of the cache", () -> {
            cache.put("job:text:007", "x");
            return List.of("written", template.opsForValue().get("job:text:007"));
        });
    }

    private static void states(String driver, StringRedisTemplate template) {
        health(driver, template);
        Steps.step(driver + " a list", () -> template.opsForList().range("job:list:alerts", 0, -1));
        Steps.step(driver + " a set", () -> Steps.sorted(template.opsForSet().members("job:set:airports")));
        Steps.step(driver + " a sorted set", () -> template.opsForZSet().reverseRange("job:ranks:delays", 0, -1));
        Steps.step(driver + " a transaction", () -> template.execute(new SessionCallback<List<Object>>() {
            @Override
            @SuppressWarnings("unchecked")
            public <K, V> List<Object> execute(RedisOperations<K, V> operations) {
                operations.multi();
                operations.opsForValue().get("job:text:007");
                operations.opsForList().size((K) "job:list:alerts");
                return operations.exec();
            }
        }));
        Steps.step(driver + " a state's notification", () -> {
            try (Listener listener = new Listener(template, "__keyspace@0__:job:text:live")) {
                Steps.ask("put", "job:text:live", "1");
                String set = listener.next();
                Steps.ask("delete", "job:text:live");
                return List.of(set, listener.next());
            }
        });
    }

    private static void writes(String driver, ConfigurableApplicationContext context) {
        StringRedisTemplate template = context.getBean(StringRedisTemplate.class);
        Steps.step(driver + " the cache", () -> {
            Cached cached = context.getBean(Cached.class);
            List<Object> found = new ArrayList<>(List.of(cached.answer("a")));
            Steps.untilEqual(() -> template.hasKey("answers::a"), true); // Lettuce writes behind the call
            found.addAll(List.of(cached.answer("a"), cached.calls()));
            cached.forget("a");
            Steps.untilEqual(() -> template.hasKey("answers::a"), false);
            found.addAll(List.of(cached.answer("a"), cached.calls()));
            Steps.untilEqual(() -> template.hasKey("answers::a"), true);
            cached.forget("a");
            Steps.untilEqual(() -> template.hasKey("answers::a"), false);
            return found;
        });
        Steps.step(driver + " a repository", () -> {
            Cars cars = context.getBean(Cars.class);
            cars.save(new Car("1", "Praha", null));
            cars.save(new Car("2", "Brno", null));
            Set<String> found = new TreeSet<>();
            cars.findByCity("Praha").forEach(each -> found.add(each.id));
            Object all = cars.count();
            cars.deleteById("1");
            return List.of(found, all, cars.findById("2").get().city, cars.findByCity("Praha").size());
        });
        Steps.step(driver + " an expired entity's event", () -> {
            EVENTS.clear();
            context.getBean(Cars.class).save(new Car("3", "Plzeň", 1L));
            return EVENTS.poll(30, TimeUnit.SECONDS);
        });
        Steps.step(driver + " sessions", () -> sessions(context.getBean(FindByIndexNameSessionRepository.class), template));
        Steps.step(driver + " a script", () -> template.execute(
                RedisScript.of("redis.call('SET', KEYS[1], ARGV[1]) return redis.call('INCR', KEYS[1])", Long.class), List.of("own:n"), "41"));
        Steps.step(driver + " a listener container", () -> {
            try (Listener listener = new Listener(template, "own:channel")) {
                return List.of(template.convertAndSend("own:channel", "hello"), listener.next());
            }
        });
        Steps.step(driver + " a stream container", () -> stream(template));
        Steps.step(driver + " keys of both", () -> template.opsForValue().multiGet(List.of("own:n", "job:text:007")));
        Steps.step(driver + " delete", () -> template.delete(List.of("own:n", "own:stream")));
    }

    /** A session is created, found by its user, expires or is deleted; each gives an event. */
    private static <S extends Session> Object sessions(FindByIndexNameSessionRepository<S> sessions, StringRedisTemplate template)
            throws Exception {
        EVENTS.clear();
        List<Object> found = new ArrayList<>();
        S kept = sessions.createSession();
        kept.setAttribute(FindByIndexNameSessionRepository.PRINCIPAL_NAME_INDEX_NAME, "ada");
        kept.setAttribute("color", "blue");
        sessions.save(kept);
        found.add(EVENTS.poll(30, TimeUnit.SECONDS));
        found.add((String) sessions.findById(kept.getId()).getAttribute("color"));
        found.add(sessions.findByPrincipalName("ada").containsKey(kept.getId()));
        sessions.deleteById(kept.getId());
        found.add(EVENTS.poll(30, TimeUnit.SECONDS));
        S brief = sessions.createSession();
        brief.setMaxInactiveInterval(Duration.ofSeconds(1));
        sessions.save(brief);
        found.add(EVENTS.poll(30, TimeUnit.SECONDS));
        found.add(EVENTS.poll(30, TimeUnit.SECONDS));
        return found;
    }

    private static Object stream(StringRedisTemplate template) throws Exception {
        template.opsForStream().add("own:stream", Map.of("f", "v"));
        template.opsForStream().createGroup("own:stream", ReadOffset.from("0"), "group");
        BlockingQueue<Object> records = new ArrayBlockingQueue<>(10);
        StreamMessageListenerContainer<String, MapRecord<String, String, String>> container = StreamMessageListenerContainer.create(
                template.getConnectionFactory(),
                StreamMessageListenerContainerOptions.builder().pollTimeout(Duration.ofMillis(200)).build());
        container.receiveAutoAck(
                Consumer.from("group", "me"),
                StreamOffset.create("own:stream", ReadOffset.lastConsumed()),
                each -> records.add(each.getValue()));
        container.start();
        try {
            List<Object> found = new ArrayList<>(List.of(records.poll(30, TimeUnit.SECONDS)));
            template.opsForStream().add("own:stream", Map.of("f", "w"));
            found.add(records.poll(30, TimeUnit.SECONDS));
            return found;
        } finally {
            container.stop();
        }
    }

    /** What reads need. */
    @Configuration
    @EnableAutoConfiguration
    static class Application {}

    /** What writes keys of its own: its beans send CONFIG SET notify-keyspace-events where these are missing. */
    @Configuration
    @EnableCaching
    @EnableRedisRepositories(considerNestedRepositories = true, enableKeyspaceEvents = EnableKeyspaceEvents.ON_STARTUP)
    @EnableRedisIndexedHttpSession
    static class Writing {
        @Bean
        Cached cached() {
            return new Cached();
        }

        @EventListener
        void created(SessionCreatedEvent event) {
            EVENTS.add("created");
        }

        @EventListener
        void deleted(SessionDeletedEvent event) {
            EVENTS.add("deleted");
        }

        @EventListener
        void expired(SessionExpiredEvent event) {
            EVENTS.add("expired");
        }

        @EventListener
        void expired(RedisKeyExpiredEvent<?> event) {
            if (event.getValue() instanceof Car car) EVENTS.add("expired " + car.id);
        }
    }

    static class Cached {
        private int calls;

        public int calls() {
            return calls;
        }

        @Cacheable("answers")
        public String answer(String question) {
            calls++;
            return "answer to " + question;
        }

        @CacheEvict("answers")
        public void forget(String question) {}
    }

    @RedisHash("own:cars")
    static final class Car {
        @Id String id;
        @Indexed String city;
        @TimeToLive Long ttlSeconds;

        Car(String id, String city, Long ttlSeconds) {
            this.id = id;
            this.city = city;
            this.ttlSeconds = ttlSeconds;
        }
    }

    interface Cars extends CrudRepository<Car, String> {
        List<Car> findByCity(String city);
    }

    /** A listener container with one channel. */
    private static final class Listener implements AutoCloseable {
        private final BlockingQueue<String> messages = new ArrayBlockingQueue<>(100);
        private final RedisMessageListenerContainer container = new RedisMessageListenerContainer();

        Listener(StringRedisTemplate template, String channel) {
            RedisConnectionFactory connections = template.getRequiredConnectionFactory();
            container.setConnectionFactory(connections);
            container.addMessageListener((message, pattern) -> messages.add(message.toString()), new ChannelTopic(channel));
            container.afterPropertiesSet();
            container.start();
        }

        String next() throws InterruptedException {
            return String.valueOf(messages.poll(30, TimeUnit.SECONDS));
        }

        @Override
        public void close() throws Exception {
            container.destroy();
        }
    }
}
