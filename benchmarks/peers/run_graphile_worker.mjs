// graphile-worker. It deletes jobs that are done, and notifies in the transaction that inserts one.

import { URL, handled, load, main } from "./wire.mjs";

const { Logger, makeWorkerUtils, run } = await load("graphile-worker");

// By default it writes a line for each job to stdout.
const logger = new Logger(() => () => {});
const connect = () => makeWorkerUtils({ connectionString: URL, logger });

async function setup() {
  await (await connect()).migrate();
}

async function publisher() {
  const utils = await connect();
  return {
    one: (payload) => utils.addJob("peers", payload),
    many: (payloads) => utils.addJobs(payloads.map((payload) => ({ identifier: "peers", payload }))),
    clear: () => utils.withPgClient((client) => client.query("DELETE FROM graphile_worker._private_jobs")),
    async left() {
      const query = "SELECT count(*) FROM graphile_worker._private_jobs";
      const { rows } = await utils.withPgClient((client) => client.query(query));
      return rows[0].count;
    },
  };
}

async function worker({ jobs = 1, local, batched }) {
  const concurrentJobs = Number(jobs);
  const settings = { connectionString: URL, logger, concurrentJobs, maxPoolSize: Math.max(10, concurrentJobs + 1) };
  if (local) settings.localQueue = { size: Number(local) };
  if (batched) Object.assign(settings, { completeJobBatchDelay: Number(batched), failJobBatchDelay: Number(batched) });
  // It ends in an orderly way on SIGTERM by itself.
  return () => run({ preset: { worker: settings }, taskList: { peers: (payload) => handled(payload) } });
}

await main({ setup, publisher, worker });
