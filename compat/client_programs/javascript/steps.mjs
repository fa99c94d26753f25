// What both programs share: the address, the lines of their steps, and requests to the runner.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const { PLACE, REDIS_HOST, REDIS_PORT, REDIS_USER, REDIS_PASSWORD, REDIS_CA } = process.env;

export const place = PLACE;
export const host = REDIS_HOST;
export const port = Number(REDIS_PORT);
export const user = REDIS_USER;
export const password = REDIS_PASSWORD;
export const ca = REDIS_CA && readFileSync(REDIS_CA);

// How many texts the states have: job:text:000 to job:text:299, each with its number.
const TEXTS = 300;
// Longer than any wait on a busy machine; it ends a hang.
const WAIT_MS_MAX = 120_000;

export const text = (number) => `job:text:${String(number).padStart(3, "0")}`;
export const allTexts = Array.from({ length: TEXTS }, (_, number) => text(number));
export const script = "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])";

// An error's name and text, without ports, and without the text of NOPERM, which Redis 7.4 has changed.
const errorText = (error) =>
  `${error.name}: ${error.message}`.replace(/(?<=127\.0\.0\.1:)\d+/g, "PORT").replace(/NOPERM .*/, "NOPERM");

// Print what a step returns, or its error.
export const step = async (name, body) => {
  const result = await body().then((found) => JSON.stringify(found) ?? "undefined", errorText);
  console.log(`${name}: ${result}`);
};

const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

// Ask the runner to put or delete a state's key, or to kill the server that has a key; wait until it is done.
export const ask = async (...words) => {
  console.log(`! ${words.join(" ")}`);
  if ((await answers.next()).done) throw new Error("the runner has ended");
};

// Call until the result is the expected one, and return it; errors meanwhile are no results.
export const untilEqual = async (find, expected) => {
  const end = Date.now() + WAIT_MS_MAX;
  for (;;) {
    const found = await find().catch(errorText);
    if (JSON.stringify(found) === JSON.stringify(expected) || Date.now() > end) return found;
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
};

// Messages in their order, each returned once.
export class Inbox {
  #messages = [];
  #waiting = [];

  add = (message) => {
    const waiting = this.#waiting.shift();
    if (waiting) waiting(message);
    else this.#messages.push(message);
  };

  next = () =>
    this.#messages.length ? Promise.resolve(this.#messages.shift()) : new Promise((resolve) => this.#waiting.push(resolve));
}
