// Scenarios for node-redis; `port` and `given` come from the test.
import { BasicClientSideCache, createClient, RESP_TYPES } from "redis";

import { base64, changed, errorOf, given, pause, port, run } from "./scenarios.mjs";

const connect = async (options = {}) => {
  const client = createClient({ socket: { port, host: "127.0.0.1" }, ...options });
  client.on("error", () => {});
  await client.connect();
  return client;
};

const collect = async (iterator) => {
  const found = [];
  for await (const some of iterator) found.push(...[some].flat());
  return found;
};

await run({
  async reads() {
    const client = await connect();
    const buffers = client.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });
    return {
      get: await client.get("plain"),
      missing: await client.get("missing"),
      bytes: base64(await buffers.get(Buffer.from("00ff0d0a80", "hex"))),
      mget: await client.mGet(["number", "missing", "hash:one", "empty"]),
      hgetall: await client.hGetAll("hash:small"),
      none: await client.hGetAll("missing"),
      hmget: await client.hmGet("hash:one", ["field", "missing"]),
      lrange: await client.lRange("list:short", 0, -1),
      ttl: [await client.ttl("plain"), await client.pTTL("missing"), await client.pExpireTime("later")],
      type: await client.type("hash:one"),
      exists: await client.exists(["plain", "missing"]),
      dbsize: await client.dbSize(),
    };
  },

  // Its own cache; `given` is a key.
  async caching() {
    const cache = new BasicClientSideCache();
    const client = await connect({ RESP: 3, clientSideCache: cache });
    const before = [await client.get(given[0]), await client.get(given[0])];
    const hits = cache.stats().hitCount;
    await pause();
    return { before, hits, after: await changed(() => client.get(given[0]), before[0]) };
  },

  async resp2() {
    const client = await connect({ RESP: 2 });
    return { get: await client.get("plain"), hgetall: await client.hGetAll("hash:one") };
  },

  async killing() {
    const off = { socket: { port, host: "127.0.0.1", reconnectStrategy: false } };
    const clients = await Promise.all([connect(off), connect(off), connect(off), connect(off)]);
    const ids = await Promise.all(clients.map((client) => client.clientId()));
    const listed = (await clients[0].clientList()).map((client) => client.id);
    const ended = new Promise((resolve) => clients[1].once("error", resolve));
    const killed = await clients[0].clientKill({ filter: "ID", id: ids[1] });
    await ended;
    return { all: ids.every((id) => listed.includes(id)), killed, other: await clients[2].get("plain") };
  },

  // `given`: a channel of notifications, and one of epochs.
  async messages() {
    const [told, client] = [await connect(), await connect()];
    const heard = (subscribe, name) =>
      new Promise((resolve) => {
        told[subscribe](name, (text, channel) => resolve([channel, text]));
      });
    const message = heard("subscribe", "news");
    const notification = heard("pSubscribe", "__keyspace@0__:*");
    const epoch = heard("subscribe", given[1]);
    await told.subscribe("last", () => {});
    const received = await client.publish("news", "hello");
    await message;
    await pause();
    return { received, message: await message, notification: await notification, epoch: await epoch };
  },

  // Of a job that runs: `given` are a map that changes, its channel, the one of its job's epochs, and ways to track.
  async pushes() {
    const [key, channel, epochs, ...modes] = given;
    const [told, client] = [await connect(), await connect({ RESP: 3, emitInvalidate: true })];
    const heard = {};
    const waiting = new Map();
    const next = (name) => new Promise((resolve) => waiting.set(name, resolve));
    const hear = (text, name) => waiting.get(name)?.(text);
    client.on("invalidate", (name) => name?.toString() === key && hear(key, "invalidated"));
    for (const name of ["news", epochs]) await told.subscribe(name, hear);
    await told.pSubscribe("__keyspace@0__:*", hear);
    await told.sSubscribe("shard", hear);
    const [message, sharded] = [next("news"), next("shard")];
    await client.publish("news", "hello");
    await client.sPublish("shard", "hello");
    heard.messages = [await message, await sharded];
    heard.notification = await next(channel);
    heard.epoch = await next(epochs);
    heard.invalidated = [];
    for (const mode of modes) {
      await client.sendCommand(["CLIENT", "TRACKING", "ON", ...mode.split(" ").filter(Boolean)]);
      const invalidated = next("invalidated");
      if (mode === "OPTIN") await client.sendCommand(["CLIENT", "CACHING", "YES"]);
      await client.hGetAll(key);
      heard.invalidated.push(await invalidated);
      await client.sendCommand(["CLIENT", "TRACKING", "OFF"]);
    }
    // Its own cache: it hits, and what it has does not stay.
    const cache = new BasicClientSideCache();
    const caching = await connect({ RESP: 3, clientSideCache: cache });
    while (cache.stats().hitCount === 0) await caching.hGetAll(key);
    const before = JSON.stringify(await caching.hGetAll(key));
    await changed(async () => JSON.stringify(await caching.hGetAll(key)), before);
    return heard;
  },

  async streams() {
    const client = await connect();
    const pairs = await collect(client.hScanIterator("hash:large", { COUNT: 100 }));
    return {
      keys: await collect(client.scanIterator({ MATCH: "many:*", COUNT: 50 })),
      all: (await collect(client.scanIterator())).length,
      fields: pairs.length,
      value: pairs.find(({ field }) => field === "field:00042").value,
    };
  },

  async pipeline() {
    const client = await connect();
    const replies = await Promise.allSettled([
      client.get("plain"),
      client.get("hash:one"),
      client.set("plain", "x"),
      client.hGet("hash:one", "field"),
    ]);
    return replies.map(({ reason, value }) => (reason ? reason.message : value));
  },

  async autoPipelining() {
    const client = await connect();
    return Promise.all(Array.from({ length: 300 }, (_, at) => client.get(`many:${String(at).padStart(3, "0")}`)));
  },

  async refusals() {
    const client = await connect();
    return {
      set: await errorOf(client.set("plain", "x")),
      type: await errorOf(client.get("hash:one")),
      multi: await errorOf(client.multi().get("plain").exec()),
      unknown: await errorOf(client.sendCommand(["NOPE", "a"])),
      after: await client.get("plain"),
    };
  },

  async settings() {
    const client = await connect({ name: "a-name", database: 1 });
    const info = await client.clientInfo();
    return { name: await client.clientGetName(), get: await client.get("plain"), info, ready: client.isReady };
  },

  async password() {
    const [password] = given;
    const client = await connect({ password });
    const named = await connect({ username: "default", password });
    const wrong = errorOf(connect({ password: "wrong", socket: { port, host: "127.0.0.1", reconnectStrategy: false } }));
    return { get: await client.get("plain"), named: await named.get("plain"), wrong: await wrong };
  },

  async reconnect() {
    const client = await connect();
    const before = await client.get("plain");
    await pause();
    return { before, after: await client.get("plain") };
  },
});
