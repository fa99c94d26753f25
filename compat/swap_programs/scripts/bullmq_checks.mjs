// BullMQ: its queues are Lua scripts, its workers block in BZPOPMIN, and its events are a stream.
import { address, load, once, run } from "./checks.mjs";

const { Queue, Worker, QueueEvents, FlowProducer } = load("bullmq");
const connection = { ...address, maxRetriesPerRequest: null };
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Run a body with a queue, its events, and a worker for it; close them after.
const withQueue = async (name, processor, body, options = {}) => {
  const queue = new Queue(name, { connection });
  const events = new QueueEvents(name, { connection });
  await events.waitUntilReady();
  const worker = processor && new Worker(name, processor, { connection, ...options });
  worker?.on("error", (error) => console.error(name, error));
  events.on("error", (error) => console.error(name, error));
  try {
    return await body(queue, events, worker);
  } finally {
    await worker?.close();
    await events.close();
    await queue.close();
  }
};

await run({
  "jobs and their results": () =>
    withQueue("results", async (job) => job.data.number * 2, async (queue, events) => {
      const jobs = await queue.addBulk([1, 2, 3, 4, 5].map((number) => ({ name: "double", data: { number } })));
      const results = await Promise.all(jobs.map((job) => job.waitUntilFinished(events)));
      return [results, await queue.getJobCounts("completed", "waiting", "active", "failed")];
    }),
  "a worker that waits for its first job": () =>
    withQueue("idle", async () => "done", async (queue, events, worker) => {
      await worker.waitUntilReady();
      await sleep(300);
      const job = await queue.add("late", {});
      return job.waitUntilFinished(events);
    }),
  "a job that fails and is tried again": () =>
    withQueue(
      "retries",
      async (job) => {
        if (job.attemptsMade < 2) throw new Error("as told");
        return job.attemptsMade;
      },
      async (queue, events) => {
        const job = await queue.add("again", {}, { attempts: 3, backoff: { type: "fixed", delay: 50 } });
        return job.waitUntilFinished(events);
      },
    ),
  "a job that fails for good": () =>
    withQueue(
      "failures",
      async () => {
        throw new Error("as told");
      },
      async (queue, events) => {
        const job = await queue.add("never", {});
        const reason = await job.waitUntilFinished(events).catch((error) => error.message);
        return [reason, await job.getState(), await queue.getFailedCount()];
      },
    ),
  "a job that starts later": () =>
    withQueue("delayed", async () => "done", async (queue, events) => {
      const job = await queue.add("later", {}, { delay: 300 });
      return [await job.getState(), await job.waitUntilFinished(events)];
    }),
  "priorities, and a pause": () => {
    const order = [];
    return withQueue(
      "priorities",
      async (job) => order.push(job.data.priority),
      async (queue, events) => {
        await queue.pause();
        const jobs = [];
        for (const priority of [5, 1, 3]) jobs.push(await queue.add("job", { priority }, { priority }));
        const counts = await queue.getJobCounts("prioritized", "paused");
        await queue.resume();
        await Promise.all(jobs.map((job) => job.waitUntilFinished(events)));
        return [counts, order];
      },
    );
  },
  "a job for each tick of a scheduler": () =>
    withQueue("ticks", async () => "tick", async (queue, events) => {
      const ticks = new Promise((resolve) => {
        let count = 0;
        events.on("completed", () => ++count === 3 && resolve("three ticks"));
      });
      await queue.upsertJobScheduler("clock", { every: 100 });
      const found = await ticks;
      return [found, await queue.removeJobScheduler("clock")];
    }),
  "a limit of the rate": () =>
    withQueue(
      "rates",
      async () => "done",
      async (queue, events) => {
        const jobs = await queue.addBulk(Array.from({ length: 6 }, () => ({ name: "job", data: {} })));
        const began = Date.now();
        await Promise.all(jobs.map((job) => job.waitUntilFinished(events)));
        return Date.now() - began >= 300;
      },
      { limiter: { max: 2, duration: 200 } },
    ),
  "progress, logs and events": () =>
    withQueue(
      "progress",
      async (job) => {
        await job.updateProgress(50);
        await job.log("half");
        return "done";
      },
      async (queue, events) => {
        const progress = once(events, "progress");
        const job = await queue.add("job", {});
        const result = await job.waitUntilFinished(events);
        const [{ data }] = await progress;
        return [data, result, (await queue.getJobLogs(job.id)).logs];
      },
    ),
  "a parent that waits for its children": () =>
    withQueue(
      "flow",
      async (job) => (job.name === "parent" ? Object.values(await job.getChildrenValues()).sort() : job.data.value),
      async (queue, events) => {
        const flow = new FlowProducer({ connection });
        const child = (value) => ({ name: "child", queueName: "flow", data: { value } });
        const tree = await flow.add({ name: "parent", queueName: "flow", children: [child(1), child(2)] });
        const result = await tree.job.waitUntilFinished(events);
        await flow.close();
        return result;
      },
    ),
  "drain, clean and obliterate": () =>
    withQueue("removed", null, async (queue) => {
      await queue.addBulk(Array.from({ length: 10 }, () => ({ name: "job", data: {} })));
      const before = await queue.count();
      await queue.drain();
      const after = await queue.count();
      await queue.obliterate({ force: true });
      return [before, after, await queue.getJobCounts()];
    }),
});
