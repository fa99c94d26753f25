// redlock on ioredis: locks are SET NX PX and Lua scripts.
import { address, load, run } from "./checks.mjs";

const Redis = load("ioredis");
const Redlock = load("redlock");
const client = new (Redis.default ?? Redis)(address);
const redlock = new Redlock([client], { retryCount: 0 });
const patient = new Redlock([client], { retryCount: 100, retryDelay: 20, retryJitter: 10 });

const failure = (promise) => promise.then(() => "no error", (error) => error.name);

await run({
  "lock and unlock": async () => {
    const lock = await redlock.lock("a lock", 10_000);
    const refused = await failure(redlock.lock("a lock", 10_000));
    await lock.unlock();
    return [refused, await client.exists("a lock"), await failure(lock.unlock())];
  },
  extend: async () => {
    const lock = await redlock.lock("extended", 1_000);
    const longer = await lock.extend(60_000);
    const left = await client.pttl("extended");
    await longer.unlock();
    return [left > 30_000, await failure(lock.extend(1_000))];
  },
  "several resources": async () => {
    const lock = await redlock.lock(["one", "two"], 10_000);
    const refused = await failure(redlock.lock(["two", "three"], 10_000));
    const free = await client.exists("three");
    await lock.unlock();
    return [refused, free, await client.exists("one", "two")];
  },
  "a lock that expires": async () => {
    await redlock.lock("brief", 100);
    const next = await patient.lock("brief", 10_000);
    await next.unlock();
    return "locked";
  },
  "ten that want one lock": async () => {
    let inside = 0;
    let most = 0;
    const order = await Promise.all(
      Array.from({ length: 10 }, async () => {
        const lock = await patient.lock("wanted", 10_000);
        most = Math.max(most, ++inside);
        await new Promise((resolve) => setTimeout(resolve, 5));
        inside--;
        await lock.unlock();
        return "done";
      }),
    );
    return [most, order.length];
  },
});
