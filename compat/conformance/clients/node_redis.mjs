// node-redis of any major version: a plain client, or the cluster's; RESP3 where a version's default is RESP2 as well.
import { readFileSync } from "node:fs";

import { request, collect, failure, Inbox, library, main, MANY, eventually, sorted } from "./scenario.mjs";

const { createClient, createCluster, RESP_TYPES } = library;

const quiet = (client) => {
  client.on("error", () => {});
  return client;
};
const plainClient = ({ host, port }, { socket = {}, ...options } = {}) =>
  quiet(createClient({ socket: { host, port, reconnectStrategy: 50, ...socket }, ...options })).connect();

const clusterClient = async ({ host, port }, { socket = {}, ...options } = {}) => {
  const client = createCluster({
    rootNodes: [{ socket: { host, port, ...socket } }],
    defaults: { socket: { reconnectStrategy: 50, ...socket }, ...options },
  });
  await quiet(client).connect();
  return client;
};
const connect = (at, options) => (at.is_cluster ? clusterClient(at, options) : plainClient(at, options));

// Run with a client, then close it.
const using = async (connecting, use) => {
  const client = await connecting;
  try {
    return await use(client);
  } finally {
    client.destroy();
  }
};

// In both versions of the protocol; the outcomes are equal.
const feature = (use) => async (at) => ({
  RESP2: await using(connect(at, { RESP: 2 }), (client) => use(client, at)),
  RESP3: await using(connect(at, { RESP: 3 }), (client) => use(client, at)),
});

const send = (client, at, key, words) =>
  at.is_cluster ? client.sendCommand(key, true, words) : client.sendCommand(words);

await main({
  connect: (at) =>
    using(plainClient(at, { name: "a-name", database: at.is_cluster ? 0 : 1 }), async (named) => [
      await named.ping(),
      await named.clientGetName(),
      at.is_cluster ? null : await named.dbSize(),
      await using(connect(at), (client) => (at.is_cluster ? "x" : client.echo("x"))),
    ]),

  "sets, sorted sets": feature(async (client) => ({
    scard: await client.sCard("set:large"),
    sismember: await client.smIsMember("set:small", ["a", "missing"]),
    smembers: sorted(await client.sMembers("set:odd")),
    sinter: sorted(await client.sInter(["{tag}set", "{tag}set2"])),
    zcard: await client.zCard("zset:large"),
    zscore: [String(await client.zScore("zset:small", "d")), String(await client.zScore("zset:small", "f"))],
    zrank: await client.zRank("zset:large", "member:00042"),
    zrange: (await client.zRangeWithScores("zset:small", 0, -1)).map(({ value, score }) => [value, String(score)]),
    zrevrange: await client.zRange("zset:large", 0, 9, { REV: true }),
    zrangebyscore: await client.zRangeByScore("zset:small", "-inf", "(3", { LIMIT: { offset: 1, count: 2 } }),
    zrangebylex: await client.zRangeByLex("zset:same", "[a", "(c"),
    zcount: await client.zCount("zset:large", 10, 20),
  })),

  "strings, hashes, lists": feature(async (client) => ({
    get: await client.get("plain"),
    missing: await client.get("missing"),
    bytes: await client.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer }).get(Buffer.from("00ff0d0a80", "hex")),
    mget: await client.mGet(["{tag}a", "{tag}b", "{tag}hash", "{tag}missing"]),
    getrange: await client.getRange("plain", 1, 3),
    hgetall: await client.hGetAll("hash:small"),
    none: await client.hGetAll("missing"),
    hmget: await client.hmGet("hash:one", ["field", "missing"]),
    hkeys: sorted(await client.hKeys("hash:small")),
    hlen: await client.hLen("hash:large"),
    lrange: await client.lRange("list:short", 0, -1),
    lindex: await client.lIndex("list:long", -1),
    lpos: await client.lPosCount("list:short", "a", 0),
    ttl: [await client.ttl("plain"), await client.pTTL("missing"), await client.pExpireTime("later")],
    type: await client.type("hash:one"),
    exists: await client.exists(["{tag}a", "{tag}missing"]),
  })),

  pipelines: feature(async (client) => {
    const replies = await Promise.allSettled([
      ...MANY.map((key) => client.get(key)),
      client.get("hash:one"),
      client.hGetAll("hash:one"),
      client.lRange("list:short", 0, 1),
    ]);
    return replies.map(({ reason, value }) => (reason ? reason.message : value));
  }),

  transactions: (at) =>
    using(plainClient(at), async (client) => {
      const found = [await client.multi().get(at.live).exists(at.live).exec()];
      for (const changes of [false, true]) {
        await client.watch(at.live);
        if (changes) await request("put", { key: at.live, value: "changed" });
        found.push(await failure(() => client.multi().type(at.live).exec()));
      }
      await request("delete", { key: at.live });
      return found;
    }),

  scan: async (at) => {
    // A cluster's client scans node by node.
    const scanned = async (options) => {
      if (!at.is_cluster) return using(plainClient(at), async (client) => sorted(await collect(client.scanIterator(options))));
      return using(clusterClient(at), async (client) => {
        const nodes = await Promise.all(client.masters.map((master) => client.nodeClient(master)));
        const found = await Promise.all(nodes.map((node) => collect(node.scanIterator(options))));
        return sorted(found.flat());
      });
    };
    return {
      all: await scanned({ COUNT: 100 }),
      match: await scanned({ MATCH: "user:*" }),
      type: await scanned({ TYPE: "hash" }),
      hscan: at.is_cluster
        ? null
        : await using(plainClient(at), async (client) => (await collect(client.hScanIterator("hash:large"))).length),
    };
  },

  "long values": feature(async (client) => [
    await client.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer }).get("big"),
    Object.entries(await client.hGetAll("hash:large")).sort(),
    await client.lRange("list:long", 0, -1),
    await client.mGet(Array(5000).fill("{tag}a")),
  ]),

  errors: feature(async (client, at) => [
    await failure(() => client.get("hash:one")),
    await failure(() => send(client, at, "list:one", ["LRANGE", "list:one", "x", "1"])),
    await failure(() => send(client, at, "hash:one", ["HGET", "hash:one"])),
    await failure(() => send(client, at, "a", ["NOPE", "a", "b"])),
    await client.get("plain"),
  ]),

  "write refused": feature(async (client) => [
    await failure(() => client.set("plain", "x")),
    await failure(() => client.del("plain")),
    await failure(() => client.hSet("hash:one", "field", "x")),
    await failure(() => client.incr("number")),
    await client.get("plain"),
  ]),

  "pub/sub": async (at) => {
    const received = async (RESP) =>
      using(plainClient(at, { RESP }), (subscriber) =>
        using(plainClient(at, { RESP }), async (publisher) => {
          const inbox = new Inbox();
          const put = (text, channel) => inbox.put(channel, text);
          await subscriber.subscribe(["news", "more"], put);
          await subscriber.pSubscribe("n?ws", (text, channel) => inbox.put("pattern", channel, text));
          const found = [await publisher.publish("news", "first"), sorted(await inbox.take(2))];
          found.push(await publisher.pubSubChannels("n*"), await publisher.pubSubNumSub(["news", "nobody"]));
          found.push(await publisher.pubSubNumPat());
          await subscriber.unsubscribe("news", put);
          found.push(await publisher.publish("more", "second"), await inbox.take(1));
          return found;
        }),
      );
    return { RESP2: await received(2), RESP3: await received(3) };
  },

  notifications: (at) =>
    using(plainClient(at), (subscriber) =>
      using(plainClient(at), async (other) => {
        const inbox = new Inbox();
        const found = [await other.configSet("notify-keyspace-events", "KEA")];
        const put = (text, channel) => inbox.put(channel, text);
        await subscriber.pSubscribe([`__keyspace@0__:${at.live}`, "__keyevent@0__:del"], put);
        await request("put", { key: at.live, value: "notified" });
        found.push(await inbox.take(1));
        await request("delete", { key: at.live });
        found.push(sorted(await inbox.take(2)), await other.configSet("notify-keyspace-events", ""));
        return found;
      }),
    ),

  // The client has a cache: it requests a value once, until the value changes.
  "client-side cache": (at) =>
    using(
      connect(at, { RESP: 3, ...(at.is_cluster ? {} : { clientSideCache: { ttl: 0, maxEntries: 0 } }) }),
      async (client) => {
        await request("put", { key: at.live, value: "1" });
        const found = [await client.get(at.live), await client.get(at.live)];
        await request("put", { key: at.live, value: "2" });
        found.push(
          await eventually(async () => {
            const value = await client.get(at.live);
            if (value !== "2") throw new Error(`it is still ${value}`);
            return value;
          }),
        );
        const stats = client.clientSideCache?.stats();
        found.push(at.is_cluster ? null : stats.hitCount > 0 && stats.missCount >= 2);
        await request("delete", { key: at.live });
        return found;
      },
    ),

  "ACL user": async (at) => [
    await using(connect(at, { username: at.user, password: at.password, socket: { reconnectStrategy: false } }), async (tenant) => [
      await tenant.get("user:1:name"),
      (await failure(() => tenant.get("plain"))).split(" ")[1],
      (await failure(() => tenant.hGetAll("hash:one"))).split(" ")[1],
    ]),
    (await failure(() => plainClient(at, { username: at.user, password: "wrong", socket: { reconnectStrategy: false } }))).split(
      " ",
    )[1],
  ],

  TLS: (at) =>
    using(
      connect({ ...at, port: at.tls_port }, { socket: { tls: true, ca: readFileSync(at.ca) } }),
      async (client) => [await client.get("plain"), await client.hGetAll("hash:one"), (await client.get("long")) === null],
    ),

  "reconnect after a restart": (at) =>
    using(connect(at), async (client) => {
      const before = await client.get("plain");
      await request("restart");
      return [before, await eventually(() => client.get("plain"))];
    }),

  "cluster redirect": (at) =>
    at.is_cluster
      ? using(clusterClient(at), async (client) => [
          await Promise.all(MANY.map((key) => client.get(key))),
          await failure(() => client.mGet(["plain", "number"])),
          await using(plainClient({ ...at, port: at.other_port }), (plain) => failure(() => plain.get(at.live))),
          client.masters.length,
        ])
      : "not supported",
});
