// Scenarios for the cluster clients of ioredis and node-redis: argument 3 is the client's name.
import { createCluster } from "redis";
import Redis from "ioredis";

import { given, pause, port, run } from "./scenarios.mjs";

const KEYS = Array.from({ length: 300 }, (_, at) => `many:${String(at).padStart(3, "0")}`);
const TRIES_MAX = 400;

const clients = {
  async ioredis() {
    const client = new Redis.Cluster([{ host: "127.0.0.1", port }], {
      clusterRetryStrategy: () => 50,
      retryDelayOnFailover: 50,
      redisOptions: { connectTimeout: 1000 },
    });
    client.on("error", () => {});
    return {
      get: (key) => client.get(key),
      mget: (...keys) => client.mget(...keys),
      ask: (command, key, ...rest) => client.call(command, key, ...rest),
      nodes: () => client.nodes("all").map((node) => node.options.port).sort(),
      close: () => client.disconnect(),
    };
  },

  async node_redis() {
    const client = createCluster({
      rootNodes: [{ url: `redis://127.0.0.1:${port}` }],
      // Where a node is lost, commands fail and are tried again, instead of waiting for it; and others are asked who
      // answers now (by itself it waits five seconds before that).
      defaults: { socket: { reconnectStrategy: 50 }, disableOfflineQueue: true },
      topologyRefreshOnReconnectionAttemptStrategy: 200,
    });
    client.on("error", () => {});
    client.on("node-error", () => {});
    await client.connect();
    return {
      get: (key) => client.get(key),
      mget: (...keys) => client.mGet(keys),
      ask: (command, key, ...rest) => client.sendCommand(key, true, [command, key, ...rest]),
      nodes: () => [...client.masters, ...client.replicas].map((node) => Number(node.address.split(":").at(-1))).sort(),
      close: () => client.destroy(),
    };
  },
};

const allOfStdin = async () => {
  const chunks = [];
  for await (const chunk of process.stdin) chunks.push(chunk);
  return Buffer.concat(chunks).toString();
};

// What a user's own retry would be: until the client has found the new owner.
const patiently = async (ask) => {
  for (let tries = 1; ; tries += 1) {
    try {
      return await ask();
    } catch (error) {
      if (tries === TRIES_MAX) throw error;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  }
};

const all = (client) => Promise.all(KEYS.map((key) => patiently(() => client.get(key))));

await run({
  // Ask for everything that the test names on standard input, and print what is answered.
  async everything() {
    const client = await clients[given[0]]();
    const requests = JSON.parse(await allOfStdin());
    const replies = await Promise.all(requests.map(([command, key, ...rest]) => client.ask(command, key, ...rest)));
    client.close();
    return replies;
  },

  // Read everything, wait for the test to change the cluster, read everything again.
  async follow() {
    const client = await clients[given[0]]();
    const before = await all(client);
    const many = await client.mget("many:001", "{many:001}x");
    const nodes = client.nodes();
    await pause();
    const after = await all(client);
    client.close();
    return { before, many, nodes, after };
  },
});
