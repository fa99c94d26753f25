// node-redis: one connection for all requests in both protocols, a pool, transactions, scripts, messages; the cluster client.
import { createClient, createClientPool, createCluster, defineScript } from "redis";

import { allTexts, ask, ca, host, Inbox, password, place, port, script, step, text, untilEqual, user } from "./steps.mjs";

const replace = defineScript({
  NUMBER_OF_KEYS: 1,
  SCRIPT: script,
  parseCommand: (parser, key, value) => {
    parser.pushKey(key);
    parser.push(value);
  },
  transformReply: undefined,
});

const options = (RESP) => ({
  RESP,
  username: user,
  password,
  socket: { host, port, ...(ca && { tls: true, ca }) },
  scripts: { replace },
});

const quiet = (client) => client.on("error", () => {}); // of a connection that was killed, or of a node that has ended
const connected = (RESP) => quiet(createClient(options(RESP))).connect();

const all = (client) => Promise.all(allTexts.map((key) => client.get(key)));

const collect = async (iterator) => {
  const found = [];
  for await (const some of iterator) found.push(...some);
  return found;
};

const texts = async (client, name) => {
  await step(`${name} all texts at once`, () => all(client));
  await step(`${name} a missing key`, () => client.get("job:text:none"));
  await step(`${name} MGET`, () => client.mGet([text(1), "job:text:none", text(299)]));
  await step(`${name} STRLEN`, () => client.strLen("job:text:long"));
  await step(`${name} EXISTS, TYPE, TTL`, () => Promise.all([client.exists(text(7)), client.type(text(7)), client.ttl(text(7))]));
  await step(`${name} WRONGTYPE`, () => client.hGetAll(text(7)));
  await step(`${name} a key of others`, () => client.hLen("job:map:flight"));
  if (place === "upstream") return;
  await step(`${name} a refused write`, () => client.set(text(7), "x"));
  await step(`${name} a read after it`, () => client.get(text(7)));
  await step(`${name} a refused transaction`, () => client.multi().set(text(7), "x").exec());
};

const reads = async (client, name) => {
  await step(`${name} HGETALL`, () => client.hGetAll("job:map:flight"));
  await step(`${name} HSCAN`, async () => {
    const found = await collect(client.hScanIterator("job:map:large"));
    return new Set(found.map((each) => each.field)).size;
  });
  await step(`${name} LRANGE`, () => client.lRange("job:list:alerts", 0, -1));
  await step(`${name} SMEMBERS`, async () => (await client.sMembers("job:set:airports")).sort());
  await step(`${name} ZRANGE`, () => client.zRangeWithScores("job:ranks:delays", 0, -1));
  await step(`${name} SCAN`, async () => [...new Set(await collect(client.scanIterator({ MATCH: "job:text:1*" })))].sort());
  await step(`${name} MULTI`, () => client.multi().get(text(7)).hGet("job:map:flight", "to").exec());
  await step(`${name} a pool`, async () => {
    const pool = await quiet(createClientPool(options(), { minimum: 2, maximum: 4 })).connect();
    try {
      return await all(pool);
    } finally {
      pool.destroy();
    }
  });
};

// Subscribe with a connection of its own, and use the messages.
const listening = async (client, channel, use) => {
  const listener = await quiet(client.duplicate()).connect();
  const inbox = new Inbox();
  await listener.subscribe(channel, inbox.add);
  try {
    return await use(inbox);
  } finally {
    listener.destroy();
  }
};

// What a client notices when a state changes: a watched key, a notification; the end of its connection.
const changes = async (client, name) => {
  await step(`${name} WATCH`, async () => {
    await client.watch("job:text:watched");
    await ask("put", "job:text:watched", name);
    return client.multi().get("job:text:watched").exec();
  });
  await step(`${name} keyspace notifications`, () =>
    listening(client, "__keyspace@0__:job:text:live", async (inbox) => {
      await ask("put", "job:text:live", "1");
      const set = await inbox.next();
      await ask("delete", "job:text:live");
      return [set, await inbox.next()];
    }),
  );
  await step(`${name} after its connection was killed`, async () => {
    const other = await connected();
    const isClosed = new Promise((resolve) => client.once("reconnecting", resolve));
    const killed = await other.clientKill({ filter: "ID", id: await client.clientId() });
    other.destroy();
    await isClosed;
    return [killed, await client.get(text(7))];
  });
};

const writes = async (client, name) => {
  await step(`${name} SET, GET`, async () => [await client.set("own:text", "a"), await client.get("own:text")]);
  await step(`${name} SET NX PX`, async () => {
    const once = { condition: "NX", expiration: { type: "PX", value: 60_000 } };
    return [await client.set("own:lock", "me", once), await client.set("own:lock", "you", once), await client.del("own:lock")];
  });
  await step(`${name} hashes, lists, sets`, () =>
    Promise.all([
      client.hSet("own:map", { f: "v" }),
      client.hIncrBy("own:map", "n", 5),
      client.rPush("own:list", ["a", "b"]),
      client.blPop("own:list", 1),
      client.sAdd("own:set", ["x", "y"]),
      client.zAdd("own:ranks", { score: 1.5, value: "a" }),
    ]),
  );
  await step(`${name} keys of both`, () => client.mGet(["own:text", text(7), "none"]));
  await step(`${name} MULTI of both`, () => client.multi().incr("own:counter").get(text(7)).exec());
  await step(`${name} a script`, () => client.replace("own:text", "d"));
  await step(`${name} a stream`, async () => [
    await client.xGroupCreate("own:stream", "group", "0", { MKSTREAM: true }),
    await client.xAdd("own:stream", "1-1", { f: "v" }),
    await client.xReadGroup("group", "me", { key: "own:stream", id: ">" }),
    await client.xAck("own:stream", "group", "1-1"),
  ]);
  await step(`${name} messages`, () =>
    listening(client, "own:channel", async (inbox) => [await client.publish("own:channel", "hello"), await inbox.next()]),
  );
  await step(`${name} DEL`, () =>
    client.del(["own:text", "own:map", "own:list", "own:set", "own:ranks", "own:counter", "own:stream"]),
  );
};

// A server outside of a cluster refuses READONLY, so the client connects again and again.
const readOnlyClient = async () => {
  const client = quiet(createClient({ ...options(3), readonly: true }));
  let tries = 0;
  const found = new Promise((resolve) => {
    client.on("ready", () => resolve("ready")).on("reconnecting", () => ++tries === 5 && resolve("not ready after five connections"));
  });
  client.connect().catch(() => {});
  await found;
  client.destroy();
  return found;
};

const cluster = async () => {
  const client = await quiet(createCluster({ rootNodes: [{ socket: { host, port } }] })).connect();
  const expected = await all(client);
  await step("all texts at once", async () => expected);
  await step("a map", () => client.hGetAll("job:map:flight"));
  await ask("kill", text(7));
  await step("after a server's end", () => untilEqual(() => all(client), expected));
  await ask("put", "job:text:live", "2");
  await step("a new value after it", () => untilEqual(() => client.get("job:text:live"), "2"));
  client.destroy();
};

const alone = async (RESP) => {
  const client = await connected(RESP);
  const name = `RESP${RESP}`;
  await texts(client, name);
  if (place !== "tls") {
    await reads(client, name);
    await changes(client, name);
  }
  if (place === "upstream") await writes(client, name);
  client.destroy();
};

if (place === "cluster") await cluster();
else for (const RESP of [2, 3]) await alone(RESP);
if (place === "server") await step("with readonly: true", readOnlyClient);
process.exit();
