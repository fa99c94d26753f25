// Scenarios for ioredis; `port` and `given` come from the test.
import Redis from "ioredis";

import { base64, changed, errorOf, given, pause, port, run } from "./scenarios.mjs";

const connect = (options = {}) => {
  const client = new Redis({ port, host: "127.0.0.1", ...options });
  client.on("error", () => {});
  return client;
};

const collect = async (stream) => {
  const found = [];
  for await (const some of stream) found.push(...some);
  return found;
};

await run({
  async reads() {
    const client = connect();
    return {
      get: await client.get("plain"),
      missing: await client.get("missing"),
      bytes: base64(await client.getBuffer(Buffer.from("00ff0d0a80", "hex"))),
      mget: await client.mget("number", "missing", "hash:one", "empty"),
      hgetall: await client.hgetall("hash:small"),
      none: await client.hgetall("missing"),
      hmget: await client.hmget("hash:one", "field", "missing"),
      lrange: await client.lrange("list:short", 0, -1),
      ttl: [await client.ttl("plain"), await client.pttl("missing"), await client.pexpiretime("later")],
      type: await client.type("hash:one"),
      exists: await client.exists("plain", "missing"),
      dbsize: await client.dbsize(),
    };
  },

  // By hand, as applications do with RESP2: a second connection is told. `given` is a key.
  async caching() {
    const [client, told] = [connect({ protocol: 2 }), connect({ protocol: 2 })];
    const cache = new Map();
    told.on("message", (channel, key) => (key ? cache.delete(key) : cache.clear()));
    await told.subscribe("__redis__:invalidate");
    const id = (await client.client("LIST")).split("\n").find((line) => / flags=P /.test(line)).match(/^id=(\d+)/)[1];
    await client.client("TRACKING", "ON", "REDIRECT", id);
    let hits = 0;
    const get = async (key) => {
      if (cache.has(key)) hits += 1;
      else cache.set(key, await client.get(key));
      return cache.get(key);
    };
    const before = [await get(given[0]), await get(given[0])];
    const read = hits;
    await pause();
    return { before, hits: read, after: await changed(() => get(given[0]), before[0]) };
  },

  async resp2() {
    const client = connect({ protocol: 2 });
    return { get: await client.get("plain"), hgetall: await client.hgetall("hash:one") };
  },

  async killing() {
    const clients = Array.from({ length: 4 }, () => connect({ retryStrategy: null }));
    const ids = await Promise.all(clients.map((client) => client.client("ID")));
    const listed = (await clients[0].client("LIST")).match(/^id=\d+/gm).map((word) => Number(word.slice(3)));
    const ended = new Promise((resolve) => clients[1].once("end", resolve));
    const killed = await clients[0].client("KILL", "ID", ids[1]);
    await ended;
    return { all: ids.every((id) => listed.includes(id)), killed, other: await clients[2].get("plain") };
  },

  // `given`: a channel of notifications, and one of epochs.
  async messages() {
    const [told, client] = [connect(), connect()];
    const heard = (event, name) =>
      new Promise((resolve) => told.on(event, (...words) => words.at(-2) === name && resolve(words.slice(-2))));
    const message = heard("message", "news");
    const notification = heard("pmessage", given[0]);
    const epoch = heard("message", given[1]);
    await told.subscribe("news", given[1]);
    await told.psubscribe("__keyspace@0__:*");
    const received = await client.publish("news", "hello");
    await message;
    await pause();
    return { received, message: await message, notification: await notification, epoch: await epoch };
  },

  // Of a job that runs: `given` are a map that changes, its channel, the one of its job's epochs, and ways to track.
  async pushes() {
    const [key, channel, epochs, ...modes] = given;
    const [told, client] = [connect({ protocol: 2 }), connect({ protocol: 2 })];
    const heard = {};
    const waiting = new Map();
    const next = (name) => new Promise((resolve) => waiting.set(name, resolve));
    const hear = (...words) => {
      const [name, text] = words.slice(-2);
      if (name !== "__redis__:invalidate") waiting.get(name)?.(text);
      else if (`${text}`.split(",").includes(key)) waiting.get(name)?.(key);
    };
    for (const event of ["message", "pmessage", "smessage"]) told.on(event, hear);
    await told.subscribe("news", epochs, "__redis__:invalidate");
    await told.psubscribe("__keyspace@0__:*");
    await told.ssubscribe("shard");
    const [message, sharded] = [next("news"), next("shard")];
    await client.publish("news", "hello");
    await client.spublish("shard", "hello");
    heard.messages = [await message, await sharded];
    heard.notification = await next(channel);
    heard.epoch = await next(epochs);
    const id = (await client.client("LIST")).split("\n").find((line) => / flags=P /.test(line)).match(/^id=(\d+)/)[1];
    heard.invalidated = [];
    for (const mode of modes) {
      await client.client("TRACKING", "ON", "REDIRECT", id, ...mode.split(" ").filter(Boolean));
      const invalidated = next("__redis__:invalidate");
      if (mode === "OPTIN") await client.client("CACHING", "YES");
      await client.hgetall(key);
      heard.invalidated.push(await invalidated);
      await client.client("TRACKING", "OFF");
    }
    return heard;
  },

  async streams() {
    const client = connect();
    const pairs = await collect(client.hscanStream("hash:large", { count: 100 }));
    return {
      keys: await collect(client.scanStream({ match: "many:*", count: 50 })),
      all: (await collect(client.scanStream())).length,
      fields: pairs.length / 2,
      value: pairs[pairs.indexOf("field:00042") + 1],
    };
  },

  async pipeline() {
    const client = connect();
    const replies = await client.pipeline().get("plain").get("hash:one").set("plain", "x").hget("hash:one", "field").exec();
    return replies.map(([error, value]) => (error ? error.message : value));
  },

  async autoPipelining() {
    const client = connect({ enableAutoPipelining: true });
    return Promise.all(Array.from({ length: 300 }, (_, at) => client.get(`many:${String(at).padStart(3, "0")}`)));
  },

  async refusals() {
    const client = connect();
    return {
      set: await errorOf(client.set("plain", "x")),
      type: await errorOf(client.get("hash:one")),
      multi: await errorOf(client.multi().get("plain").exec()),
      subscribe: await errorOf(client.duplicate().subscribe("channel")),
      unknown: await errorOf(client.call("NOPE", "a")),
      after: await client.get("plain"),
    };
  },

  async settings() {
    const client = connect({ connectionName: "a-name", db: 1 });
    const info = await client.client("INFO");
    return { name: await client.client("GETNAME"), get: await client.get("plain"), info, status: client.status };
  },

  async password() {
    const [password] = given;
    const client = connect({ password });
    const named = connect({ username: "default", password });
    const wrong = connect({ password: "wrong", retryStrategy: null });
    return { get: await client.get("plain"), named: await named.get("plain"), wrong: await errorOf(wrong.get("plain")) };
  },

  async reconnect() {
    const client = connect();
    const before = await client.get("plain");
    await pause();
    return { before, after: await client.get("plain") };
  },
});
