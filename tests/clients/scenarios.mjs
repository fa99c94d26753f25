// What both JavaScript clients share: run one scenario, print what it returns as JSON.
import { createInterface } from "node:readline";

export const port = Number(process.argv[3]);
export const given = process.argv.slice(4);

// Buffers as base64, so that bytes of any kind survive JSON.
export const base64 = (value) => (value === null ? null : Buffer.from(value).toString("base64"));

// What a promise is rejected with, as text; "no error" if it is not.
export const errorOf = (promise) => promise.then(() => "no error", (error) => error.message);

// Tell the test that it may go on, and wait until it has.
export const pause = async () => {
  const lines = createInterface({ input: process.stdin });
  console.log("waiting");
  for await (const line of lines) break;
  lines.close();
};

// Read again and again until something else than before is read, and return that.
export const changed = async (read, before) => {
  let found = await read();
  while (found === before) {
    await new Promise((resolve) => setTimeout(resolve, 20));
    found = await read();
  }
  return found;
};

export const run = async (scenarios) => {
  const result = await scenarios[process.argv[2]]();
  process.stdout.write(JSON.stringify(result), () => process.exit(0));
};
