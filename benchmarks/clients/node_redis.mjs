// node-redis under load: `node node_redis.mjs PORT PREFIX KEYS`. All tasks share one connection; those with an
// optimistic transaction have a pool.
//
// Each line of the input is a workload, the number of its tasks, and seconds; the reply to it is a line of JSON.
// programs.py describes workloads and keys, which are the same for all clients. The package is that of the tests.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const require = createRequire(new URL("../../tests/clients/", import.meta.url));
const { createClient, createClientPool, WatchError } = require("redis");

const [, , port, prefix, count] = process.argv;
const keys = Number(count);
const MANY_KEYS = 20;
const PIPELINED_KEYS = 100;
const FIELDS = 20;
const KEYS_OF_A_MAP = 10; // one map for so many keys

const options = { socket: { host: "127.0.0.1", port: Number(port) } };
const client = createClient(options);
client.on("error", () => {}); // a request fails with the same error
await client.connect();
const pool = createClientPool(options, { minimum: 1, maximum: 100 });
pool.on("error", () => {});
await pool.connect();

let last = 0;
const next = () => ++last % keys;
const text = (number) => `${prefix}:text:${number % keys}`;
const value = (number) => `value:${number % keys}`;
const texts = (number, size) => Array.from({ length: size }, (_, at) => text(number + at));
const areValues = (found, number, size) => found.length === size && found.every((each, at) => each === value(number + at));
const counter = `${prefix}:counter`;
const counted = async () => Number((await client.get(counter)) ?? 0);

// Add one in an optimistic transaction; false: another client has changed the key meanwhile.
const increment = (isolated) =>
  isolated
    .watch(counter)
    .then(() => isolated.get(counter))
    .then((number) => isolated.multi().set(counter, String(Number(number ?? 0) + 1)).exec())
    .then(
      () => true,
      (error) => {
        if (error instanceof WatchError) return false;
        throw error;
      },
    );

// Each sends one request, or one pipeline or transaction, and returns whether its reply is right.
const workloads = {
  get: async (number = next()) => (await client.get(text(number))) === value(number),
  mget: async (number = next()) => areValues(await client.mGet(texts(number, MANY_KEYS)), number, MANY_KEYS),
  hgetall: async (number = Math.floor(next() / KEYS_OF_A_MAP)) => {
    const found = await client.hGetAll(`${prefix}:map:${number}`);
    return Object.keys(found).length === FIELDS && found["field:7"] === `${number}:7`;
  },
  pipeline: async (number = next()) => {
    const found = await Promise.all(texts(number, PIPELINED_KEYS).map((key) => client.get(key)));
    return areValues(found, number, PIPELINED_KEYS);
  },
  transaction: async (number = next()) => {
    const found = await client.multi().get(text(number)).get(text(number + 1)).exec();
    return areValues(found, number, 2);
  },
  set: async (number = next()) => (await client.set(`${prefix}:written:${number}`, value(number))) === "OK",
  optimistic: async () => {
    while (!(await pool.execute(increment)));
    return true;
  },
};

// Run a workload. The counter of optimistic transactions must have grown by their number.
const measured = async (name, tasks, seconds) => {
  const outcome = { requests: 0, errors: 0, wrong: 0, error: "" };
  const before = name === "optimistic" ? await counted() : 0;
  const began = performance.now();
  const task = async () => {
    do {
      outcome.requests++;
      try {
        if (!(await workloads[name]())) outcome.wrong++;
      } catch (error) {
        outcome.errors++;
        outcome.error = String(error);
      }
    } while (performance.now() - began < seconds * 1000);
  };
  await Promise.all(Array.from({ length: tasks }, task));
  outcome.seconds = (performance.now() - began) / 1000;
  if (name === "optimistic" && (await counted()) - before !== outcome.requests - outcome.errors) outcome.wrong++;
  return outcome;
};

for await (const line of createInterface({ input: process.stdin })) {
  const [name, tasks, seconds] = line.split(" ");
  console.log(JSON.stringify(await measured(name, Number(tasks), Number(seconds))));
}
client.destroy();
pool.destroy();
