// The protocol of wire.py, for programs in JavaScript.

import { writeSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

export const URL = process.env.DATABASE_URL;
const PAYLOAD = JSON.parse(process.env.PEERS_PAYLOAD);

// How many are published in one call of "many".
const BULK = 1_000;

// Milliseconds between two reports of a worker that counts.
const REPORT_INTERVAL = 20;

/** Import a package of the peer's environment, which lies above the interpreter. */
export const load = (name) => import(pathToFileURL(createRequire(process.execPath).resolve(name)));

/** Do what the command line says, with its KEY=VALUE as an object. */
export async function main({ setup, publisher, worker }) {
  const [verb, ...words] = process.argv.slice(2);
  const options = Object.fromEntries(words.filter((word) => word.includes("=")).map((word) => word.split("=", 2)));
  if (verb === "setup") {
    await setup();
    process.exit(0);
  }
  const lines = createInterface({ input: process.stdin });
  lines.on("close", () => process.exit(1));
  if (verb === "publisher") await serve(lines, await publisher(options));
  else await work(lines, words[0], await worker(options));
}

// The clock is CLOCK_MONOTONIC.
const now = () => process.hrtime.bigint();

// In one piece, past the buffers.
const say = (...words) => writeSync(1, words.join(" ") + "\n");

// --- Publishing ------------------------------------------------------------------------------------

async function serve(lines, publisher) {
  // One after the other, though the lines are events.
  let done = Promise.resolve();
  lines.on("line", (line) => {
    const [verb, argument] = line.split(" ");
    done = done.then(async () => say(...(await answers[verb](publisher, Number(argument)))));
  });
  say("READY");
}

const answers = {
  async one(publisher, seconds) {
    const start = now();
    const end = start + BigInt(Math.round(seconds * 1e9));
    let count = 0;
    let time;
    while ((time = now()) < end) {
      await publisher.one(PAYLOAD);
      count += 1;
    }
    return [count, start, time];
  },

  async many(publisher, count) {
    const start = now();
    for (let done = 0; done < count; done += BULK) await publisher.many(Array(BULK).fill(PAYLOAD));
    return [count, start, now()];
  },

  async tag(publisher, number) {
    const start = now();
    await publisher.one({ ...PAYLOAD, tag: number });
    return [1, start, now()];
  },

  left: async (publisher) => [await publisher.left()],

  async clear(publisher) {
    await publisher.clear();
    return [0];
  },
};

// --- Working ---------------------------------------------------------------------------------------

let mode;
let count = 0;
let last = 0n;
let reported = 0;

/** Start the worker, whose function starts its loop, once the first line has come. */
async function work(lines, itsMode, start) {
  mode = itsMode;
  const go = new Promise((resolve) => lines.once("line", resolve));
  say("READY");
  await go;
  if (mode === "count") setInterval(() => count === reported || report(), REPORT_INTERVAL);
  await start();
}

/** Be the handler of these messages; what it returns is to be awaited. */
export function handled(...payloads) {
  if (mode === "count") {
    count += payloads.length;
    last = now();
    if (!reported) report();
    return;
  }
  for (const payload of payloads) say(payload.tag, now());
  return mode === "hold" ? new Promise(() => {}) : undefined;
}

function report() {
  reported = count;
  say(last, reported);
}
