// What both JavaScript clients' scripts share; the protocol with who runs them is told in scenario.py.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

// The packages are installed beside the tests; the folder and the package's name come from who runs this.
const [, , folder, name] = process.argv;
const require = createRequire(`${folder}/`);
export const library = require(name);
const { version } = require(`${name}/package.json`);

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const say = (told) => process.stdout.write(`${JSON.stringify(told)}\n`);

export const MANY = Array.from({ length: 300 }, (_, at) => `many:${String(at).padStart(3, "0")}`);
export const MESSAGE_MS_MAX = 20_000;
export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Have something done to the server, and wait for it.
export const ask = async (what, given = {}) => {
  say({ do: what, ...given });
  if ((await lines.next()).done) process.exit(0);
};

// Addresses are each server's own.
export const errorText = (error) => `${error.constructor.name}: ${error.message.replace(/(?<=127\.0\.0\.1:)\d+/g, "PORT")}`;
export const failure = (call) => Promise.resolve().then(call).catch(errorText);
export const sorted = (values) => [...values].map((value) => JSON.stringify(value)).sort();

export const collect = async (stream) => {
  const found = [];
  for await (const some of stream) found.push(...[some].flat());
  return found;
};

// A caller's own retry, for as long as a server takes to come back.
export const patiently = async (call) => {
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

// Messages that are waited for one by one.
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
  say({ version, features: Object.keys(features), expected: {} });
  for await (const line of lines) {
    const { feature, at } = JSON.parse(line);
    try {
      const outcome = await features[feature](at);
      process.stdout.write(`${JSON.stringify({ outcome: outcome ?? null }, plain)}\n`);
    } catch (error) {
      say({ error: String(error.stack) });
    }
  }
  process.exit(0);
};
