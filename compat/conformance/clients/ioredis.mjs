// ioredis of any major version: a plain client, or the cluster's.
import { request, collect, failure, Inbox, library, main, MANY, eventually, sorted } from "./scenario.mjs";

const Redis = library.default ?? library;

const quiet = (client) => {
  client.on("error", () => {});
  return client;
};
const plainClient = (at, options = {}) => quiet(new Redis({ host: at.host, port: at.port, ...options }));
const connect = (at, { port = at.port, ...options } = {}) =>
  at.is_cluster
    ? quiet(
        new Redis.Cluster([{ host: at.host, port }], {
          clusterRetryStrategy: () => 50,
          redisOptions: options,
          dnsLookup: (address, callback) => callback(null, address),
        }),
      )
    : plainClient(at, { port, ...options });

// Redis writes scores with all their digits up to 7.0, and with as many as are needed since 7.2.
const score = (text) => (Number.isNaN(Number(text)) ? text : String(Number(text)));

// Run with a client, then close it.
const using = async (client, use) => {
  try {
    return await use(client);
  } finally {
    client.disconnect();
  }
};

const feature = (use) => (at) => using(connect(at), (client) => use(client, at));

await main({
  connect: (at) =>
    using(plainClient(at, { connectionName: "a-name", db: at.is_cluster ? 0 : 1 }), async (named) => [
      await named.ping(),
      await named.client("GETNAME"),
      at.is_cluster ? null : await named.dbsize(),
      await using(connect(at), (client) => client.echo("x")),
    ]),

  "sets, sorted sets": feature(async (client) => ({
    scard: await client.scard("set:large"),
    sismember: await client.smismember("set:small", "a", "missing"),
    smembers: sorted(await client.smembers("set:odd")),
    sinter: sorted(await client.sinter("{tag}set", "{tag}set2")),
    sscan: sorted(await collect(client.sscanStream("set:large"))),
    zcard: await client.zcard("zset:large"),
    zscore: [score(await client.zscore("zset:small", "d")), score(await client.zscore("zset:small", "f"))],
    zrank: await client.zrank("zset:large", "member:00042"),
    zrange: (await client.zrange("zset:small", 0, -1, "WITHSCORES")).map(score),
    zrevrange: (await client.zrevrange("zset:large", 0, 9, "WITHSCORES")).map(score),
    zrangebyscore: await client.zrangebyscore("zset:small", "-inf", "(3", "LIMIT", 1, 2),
    zrangebylex: await client.zrangebylex("zset:same", "[a", "(c"),
    zcount: await client.zcount("zset:large", 10, 20),
    zscan: (await collect(client.zscanStream("zset:large"))).length,
  })),

  "strings, hashes, lists": feature(async (client) => ({
    get: await client.get("plain"),
    missing: await client.get("missing"),
    bytes: await client.getBuffer(Buffer.from("00ff0d0a80", "hex")),
    mget: await client.mget("{tag}a", "{tag}b", "{tag}hash", "{tag}missing"),
    getrange: await client.getrange("plain", 1, 3),
    hgetall: await client.hgetall("hash:small"),
    none: await client.hgetall("missing"),
    hmget: await client.hmget("hash:one", "field", "missing"),
    hkeys: sorted(await client.hkeys("hash:small")),
    hlen: await client.hlen("hash:large"),
    lrange: await client.lrange("list:short", 0, -1),
    lindex: await client.lindexBuffer("list:odd", 0),
    lpos: await client.lpos("list:short", "a", "COUNT", 0),
    ttl: [await client.ttl("plain"), await client.pttl("missing"), await client.pexpiretime("later")],
    type: await client.type("hash:one"),
    exists: await client.exists("{tag}a", "{tag}missing"),
  })),

  pipelines: async (at) => ({
    // In a cluster a pipeline goes to one node, so its keys have one slot here.
    pipeline: await using(connect(at), (client) => {
      const keys = at.is_cluster ? ["{tag}a", "{tag}b"] : [...MANY, "{tag}a", "{tag}b"];
      return keys.reduce((pipeline, key) => pipeline.get(key), client.pipeline()).get("{tag}hash").hgetall("{tag}hash").exec();
    }),
    automatic: await using(connect(at, at.is_cluster ? {} : { enableAutoPipelining: true }), (client) =>
      Promise.all(MANY.map((key) => client.get(key))),
    ),
  }),

  transactions: (at) =>
    using(plainClient(at), async (client) => {
      const found = [await client.multi().get(at.live).exists(at.live).exec()];
      for (const changes of [false, true]) {
        await client.watch(at.live);
        if (changes) await request("put", { key: at.live, value: "changed" });
        found.push(await client.multi().type(at.live).exec());
      }
      found.push(await failure(() => client.multi().get(at.live).set(at.live, "x").exec()));
      await request("delete", { key: at.live });
      return found.slice(0, at.is_cluster ? 3 : 4);
    }),

  scan: async (at) => {
    // A cluster's client scans node by node.
    const scanned = async (options) =>
      using(connect(at), async (client) => {
        if (!at.is_cluster) return sorted(await collect(client.scanStream(options)));
        await client.ping();
        const found = await Promise.all(client.nodes("master").map((node) => collect(node.scanStream(options))));
        return sorted(found.flat());
      });
    return {
      all: await scanned({ count: 100 }),
      match: await scanned({ match: "user:*" }),
      type: await scanned({ type: "hash" }),
      hscan: await using(connect(at), async (client) => (await collect(client.hscanStream("hash:large"))).length),
    };
  },

  "long values": feature(async (client) => [
    await client.getBuffer("big"),
    Object.entries(await client.hgetall("hash:large")).sort(),
    await client.lrange("list:long", 0, -1),
    await client.mget(Array(5000).fill("{tag}a")),
  ]),

  errors: feature(async (client) => [
    await failure(() => client.get("hash:one")),
    await failure(() => client.lrange("list:one", "x", 1)),
    await failure(() => client.call("HGET", "hash:one")),
    await failure(() => client.call("NOPE", "a", "b")),
    await client.get("plain"),
  ]),

  "write refused": feature(async (client) => [
    await failure(() => client.set("plain", "x")),
    await failure(() => client.del("plain")),
    await failure(() => client.hset("hash:one", "field", "x")),
    await failure(() => client.incr("number")),
    await client.get("plain"),
  ]),

  "pub/sub": (at) =>
    using(plainClient(at), (subscriber) =>
      using(plainClient(at), async (publisher) => {
        const inbox = new Inbox();
        subscriber.on("messageBuffer", (channel, text) => inbox.put("message", channel, text));
        subscriber.on("pmessageBuffer", (pattern, channel, text) => inbox.put("pmessage", pattern, channel, text));
        const found = [await subscriber.subscribe("news", "more"), await subscriber.psubscribe("n?ws")];
        found.push(await publisher.publish("news", Buffer.from("00ff", "hex")));
        found.push(sorted(await inbox.take(2)));
        found.push(await publisher.pubsub("CHANNELS", "n*"), await publisher.pubsub("NUMSUB", "news", "nobody"));
        found.push(await publisher.pubsub("NUMPAT"), await subscriber.unsubscribe("news"));
        found.push(await publisher.publish("more", "second"), await inbox.take(1));
        return found;
      }),
    ),

  notifications: (at) =>
    using(plainClient(at), (subscriber) =>
      using(plainClient(at), async (other) => {
        const inbox = new Inbox();
        subscriber.on("pmessage", (pattern, channel, text) => inbox.put(pattern, channel, text));
        const found = [await other.config("SET", "notify-keyspace-events", "KEA")];
        await subscriber.psubscribe(`__keyspace@0__:${at.live}`, "__keyevent@0__:del");
        await request("put", { key: at.live, value: "notified" });
        found.push(await inbox.take(1));
        await request("delete", { key: at.live });
        found.push(sorted(await inbox.take(2)), await other.config("SET", "notify-keyspace-events", ""));
        return found;
      }),
    ),

  tracking: (at) =>
    using(plainClient(at, { protocol: 2 }), (subscriber) =>
      using(plainClient(at), async (reader) => {
        const inbox = new Inbox();
        subscriber.on("message", (channel, keys) => inbox.put(channel, keys));
        await request("put", { key: at.live, value: "before" });
        const id = await subscriber.client("ID");
        await subscriber.subscribe("__redis__:invalidate");
        const found = [await reader.client("TRACKING", "ON", "REDIRECT", id), await reader.get(at.live)];
        await request("put", { key: at.live, value: "after" });
        found.push(await inbox.take(1), await reader.get(at.live), await reader.client("TRACKING", "OFF"));
        await request("delete", { key: at.live });
        return found;
      }),
    ),

  "ACL user": async (at) => [
    await using(connect(at, { username: at.user, password: at.password }), async (tenant) => [
      await tenant.get("user:1:name"),
      (await failure(() => tenant.get("plain"))).split(" ")[1],
      (await failure(() => tenant.hgetall("hash:one"))).split(" ")[1],
    ]),
    await using(plainClient(at, { username: at.user, password: "wrong", maxRetriesPerRequest: 0 }), async (rejected) =>
      (await failure(() => rejected.get("user:1:name"))) !== "Ada",
    ),
  ],

  TLS: async (at) => {
    const { readFileSync } = await import("node:fs");
    const tls = { ca: readFileSync(at.ca) };
    return using(connect(at, { port: at.tls_port, tls }), async (client) => [
      await client.get("plain"),
      await client.hgetall("hash:one"),
      (await client.getBuffer("big")).length,
    ]);
  },

  "reconnect after a restart": feature(async (client) => {
    const before = await client.get("plain");
    await request("restart");
    return [before, await eventually(() => client.get("plain"))];
  }),

  "cluster redirect": (at) =>
    at.is_cluster
      ? using(connect(at), async (client) => [
          await Promise.all(MANY.map((key) => client.get(key))),
          await failure(() => client.mget("plain", "number")),
          await using(plainClient({ ...at, port: at.other_port }), (plain) => failure(() => plain.get(at.live))),
          client.nodes("master").length,
        ])
      : "not supported",
});
