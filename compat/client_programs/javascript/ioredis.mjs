// ioredis: one connection for all requests, pipelines, transactions, scripts, messages; the cluster client.
import { Redis, Cluster } from "ioredis";

import { allTexts, ask, ca, host, Inbox, password, place, port, script, step, text, untilEqual, user } from "./steps.mjs";

const connected = () => new Redis({ host, port, username: user, password, tls: ca && { ca } });

// Return the texts of all keys, in one pipeline; an error of a request is the pipeline's.
const pipeline = async (client) => {
  const requests = client.pipeline();
  for (const key of allTexts) requests.get(key);
  return values(await requests.exec());
};

const values = (replies) =>
  replies.map(([error, value]) => {
    if (error) throw error;
    return value;
  });

const collect = async (stream) => {
  const found = [];
  for await (const some of stream) found.push(...some);
  return found;
};

const texts = async (client) => {
  await step("all texts at once", () => Promise.all(allTexts.map((key) => client.get(key))));
  await step("a missing key", () => client.get("job:text:none"));
  await step("MGET", () => client.mget(text(1), "job:text:none", text(299)));
  await step("STRLEN", () => client.strlen("job:text:long"));
  await step("a pipeline", () => pipeline(client));
  await step("EXISTS, TYPE, TTL", () => Promise.all([client.exists(text(7)), client.type(text(7)), client.ttl(text(7))]));
  await step("WRONGTYPE", () => client.hgetall(text(7)));
  await step("a key of others", () => client.hlen("job:map:flight"));
  if (place === "upstream") return;
  await step("a refused write", () => client.set(text(7), "x"));
  await step("a read after it", () => client.get(text(7)));
  await step("a refused transaction", () => client.multi().set(text(7), "x").exec());
};

const reads = async (client) => {
  await step("HGETALL", () => client.hgetall("job:map:flight"));
  await step("HSCAN", async () => {
    const found = await collect(client.hscanStream("job:map:large"));
    return new Set(found.filter((_, at) => at % 2 === 0)).size; // every other is a value
  });
  await step("LRANGE", () => client.lrange("job:list:alerts", 0, -1));
  await step("SMEMBERS", async () => (await client.smembers("job:set:airports")).sort());
  await step("ZRANGE", () => client.zrange("job:ranks:delays", 0, -1, "WITHSCORES"));
  await step("SCAN", async () => [...new Set(await collect(client.scanStream({ match: "job:text:1*" })))].sort());
  await step("MULTI", async () => values(await client.multi().get(text(7)).hget("job:map:flight", "to").exec()));
};

// Subscribe with a connection of its own, and use the messages.
const listening = async (channel, use) => {
  const listener = connected();
  const inbox = new Inbox();
  listener.on("message", (_, message) => inbox.add(message));
  await listener.subscribe(channel);
  try {
    return await use(inbox);
  } finally {
    listener.disconnect();
  }
};

// What a client notices when a state changes: a watched key, a notification; the end of its connection.
const changes = async (client) => {
  await step("WATCH", async () => {
    const found = [];
    for (const isChanged of [true, false]) {
      await client.watch("job:text:watched");
      if (isChanged) await ask("put", "job:text:watched", "1");
      found.push(await client.multi().get("job:text:watched").exec());
    }
    return found;
  });
  await step("keyspace notifications", () =>
    listening("__keyspace@0__:job:text:live", async (inbox) => {
      await ask("put", "job:text:live", "1");
      const set = await inbox.next();
      await ask("delete", "job:text:live");
      return [set, await inbox.next()];
    }),
  );
  await step("after its connection was killed", async () => {
    const other = connected();
    const killed = await other.client("KILL", "ID", await client.client("ID"));
    other.disconnect();
    return [killed, await client.get(text(7))];
  });
};

const writes = async (client) => {
  await step("SET, GET", async () => [await client.set("own:text", "a"), await client.get("own:text")]);
  await step("SET NX PX", () =>
    Promise.all([
      client.set("own:lock", "me", "PX", 60_000, "NX"),
      client.set("own:lock", "you", "PX", 60_000, "NX"),
      client.del("own:lock"),
    ]),
  );
  await step("hashes, lists, sets", () =>
    Promise.all([
      client.hset("own:map", { f: "v" }),
      client.hincrby("own:map", "n", 5),
      client.rpush("own:list", "a", "b"),
      client.blpop("own:list", 1),
      client.sadd("own:set", "x", "y"),
      client.zadd("own:ranks", 1.5, "a"),
    ]),
  );
  await step("keys of both", () => client.mget("own:text", text(7), "none"));
  await step("MULTI of both", async () => values(await client.multi().incr("own:counter").get(text(7)).exec()));
  await step("a script", () => {
    client.defineCommand("replace", { numberOfKeys: 1, lua: script });
    return client.replace("own:text", "d");
  });
  await step("a stream", async () => [
    await client.xgroup("CREATE", "own:stream", "group", "0", "MKSTREAM"),
    await client.xadd("own:stream", "1-1", "f", "v"),
    await client.xreadgroup("GROUP", "group", "me", "STREAMS", "own:stream", ">"),
    await client.xack("own:stream", "group", "1-1"),
  ]);
  await step("messages", () =>
    listening("own:channel", async (inbox) => [await client.publish("own:channel", "hello"), await inbox.next()]),
  );
  await step("DEL", () =>
    client.del("own:text", "own:map", "own:list", "own:set", "own:ranks", "own:counter", "own:stream"),
  );
};

// The recipe for failovers of ioredis' documentation: the client connects and writes again and again.
const failoverRecipe = async () => {
  const client = new Redis({ host, port, reconnectOnError: () => 2 });
  const reply = client.set(text(7), "x").then(
    () => "written",
    () => "an error",
  );
  let connections = 0;
  const again = new Promise((resolve) => client.on("connect", () => ++connections === 10 && resolve("ten connections, no reply")));
  const found = await Promise.race([reply, again]);
  client.disconnect();
  return found;
};

const cluster = async () => {
  const client = new Cluster([{ host, port }]);
  client.on("error", () => {}); // of a node that has ended
  const all = () => Promise.all(allTexts.map((key) => client.get(key)));
  const expected = await all();
  await step("all texts at once", async () => expected);
  await step("a map", () => client.hgetall("job:map:flight"));
  await ask("kill", text(7));
  await step("after a server's end", () => untilEqual(all, expected));
  await ask("put", "job:text:live", "2");
  await step("a new value after it", () => untilEqual(() => client.get("job:text:live"), "2"));
  client.disconnect();
};

const alone = async () => {
  const client = connected();
  await texts(client);
  if (place !== "tls") {
    await reads(client);
    await changes(client);
  }
  if (place === "upstream") await writes(client);
  if (place === "server") await step("a refused write with reconnectOnError", failoverRecipe);
  client.disconnect();
};

await (place === "cluster" ? cluster() : alone());
process.exit();
