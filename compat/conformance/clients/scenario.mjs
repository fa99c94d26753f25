// Shared by the JavaScript scripts. scenario.py describes the protocol with the runner.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

// The runner passes the folder where the packages are installed, and the package's name.
const [, , folder, name] = process.argv;
const require = createRequire(`${folder}/`);
export const library = require(name);
const { version } = require(`${name}/package.json`);

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const send = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);

export const MANY = Array.from({ length: 300 }, (_, at) => `many:${String(at).padStart(3, "0")}`);
export const MESSAGE_MS_MAX = 20_000;
export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Have the runner change a key or restart the server, and wait for it.
export const request = async (action, options = {}) => {
  send({ do: action, ...options });
  if ((await lines.next()).done) process.exit(0);
};

// The port of an address differs between servers.
export const errorText = (error) => `${error.constructor.name}: ${error.message.replace(/(?<=127\.0\.0\.1:)\d+/g, "PORT")}`;
export const failure = (call) => Promise.resolve().then(call).catch(errorText);
export const sorted = (values) => [...values].map((value) => JSON.stringify(value)).sort();

export const collect = async (stream) => {
  const found = [];
  for await (const some of stream) found.push(...[some].flat());
  return found;
};

// Retries a call, for as long as a server takes to restart.
export const eventually = async (call) => {
  const ends = Date.now() + MESSAGE_MS_MAX;
  for (;;) {
    try {
      return await call();
    } catch (error) {
      if (Date.now() > ends) throw error;
      await pause(50);
    }
  }
};

// Received messages; `take` waits for a number of them.
export class Inbox {
  #messages = [];
  #waiting = null;

  put(...message) {
    this.#messages.push(message.map((part) => (Buffer.isBuffer(part) ? part.toString("latin1") : part)));
    this.#waiting?.();
  }

  async take(count) {
    const ends = Date.now() + MESSAGE_MS_MAX;
    while (this.#messages.length < count) {
      if (Date.now() > ends) throw new Error(`${this.#messages.length} of ${count} messages came`);
      await Promise.race([new Promise((resolve) => (this.#waiting = resolve)), pause(1000)]);
    }
    return this.#messages.splice(0, count);
  }
}

const plain = (_, value) => {
  if (value?.type === "Buffer" && Array.isArray(value.data)) return Buffer.from(value.data).toString("latin1");
  if (value instanceof Error) return errorText(value);
  if (value instanceof Map) return [...value.entries()].sort();
  if (value instanceof Set) return [...value].sort();
  return value;
};

export const main = async (features) => {
  send({ version, features: Object.keys(features), expected: {} });
  for await (const line of lines) {
    const { feature, at } = JSON.parse(line);
    try {
      const outcome = await features[feature](at);
      process.stdout.write(`${JSON.stringify({ outcome: outcome ?? null }, plain)}\n`);
    } catch (error) {
      send({ error: String(error.stack) });
    }
  }
  process.exit(0);
};
