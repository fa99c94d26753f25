// What the scripts share: run checks in order, and print each outcome as a line of JSON.
import { createRequire } from "node:module";

// node SCRIPT MODULES PORT
const [modules, port] = process.argv.slice(2);
export const load = createRequire(`${modules}/`);
export const address = { host: "127.0.0.1", port: Number(port) };

// Longer than a check ever waits on a busy machine; it ends a hang.
const CHECK_MS_MAX = 30_000;

export const run = async (checks) => {
  for (const [check, body] of Object.entries(checks)) {
    const outcome = await Promise.race([body(), late()]).catch((error) => ({ error: `${error.name}: ${error.message}` }));
    console.log(JSON.stringify({ check, outcome }));
  }
  process.exit(0);
};

// Wait for one event of an emitter, and return its arguments.
export const once = (emitter, name) => new Promise((resolve) => emitter.once(name, (...args) => resolve(args)));

const late = () =>
  new Promise((_, reject) => setTimeout(reject, CHECK_MS_MAX, new Error("no outcome in time")).unref());
