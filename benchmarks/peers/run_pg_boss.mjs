// pg-boss. One queue, which notifies: that costs a publish little, and spares a worker most of its polls.
//
// A worker that is asked for batches goes on at once while they come back full (burstWhenBatchFull), or it
// would wait for its next poll after each. Jobs that are done stay in the table until it is cleared of them.

import { URL, handled, load, main } from "./wire.mjs";

const { PgBoss } = await load("pg-boss");
const QUEUE = "peers";

async function connect(options) {
  const boss = new PgBoss({ connectionString: URL, ...options });
  boss.on("error", console.error);
  await boss.start();
  return boss;
}

async function setup() {
  const boss = await connect({ supervise: false, schedule: false });
  // A table of its own, as for queues with many jobs.
  await boss.createQueue(QUEUE, { partition: true, notify: true, heartbeatSeconds: 30 });
}

async function publisher() {
  // The workers look after the queues.
  const boss = await connect({ supervise: false, schedule: false });
  return {
    one: (payload) => boss.send(QUEUE, payload),
    many: (payloads) => boss.insert(QUEUE, payloads.map((data) => ({ data }))),
    clear: () => boss.deleteAllJobs(QUEUE),
    async left() {
      const query = "SELECT count(*) FROM pgboss.job WHERE name = $1 AND state < 'completed'";
      const { rows } = await boss.getDb().executeSql(query, [QUEUE]);
      return rows[0].count;
    },
  };
}

async function worker({ notify, supervise = 60, batch = 1, poll = 2, concurrency = 1 }) {
  const boss = await connect({
    useListenNotify: Boolean(notify),
    superviseIntervalSeconds: Number(supervise),
    monitorIntervalSeconds: Number(supervise),
  });
  process.on("SIGTERM", async () => {
    await boss.stop();
    process.exit(0);
  });
  const options = {
    batchSize: Number(batch),
    localConcurrency: Number(concurrency),
    pollingIntervalSeconds: Number(poll),
    burstWhenBatchFull: true,
  };
  return () => boss.work(QUEUE, options, (jobs) => handled(...jobs.map((job) => job.data)));
}

await main({ setup, publisher, worker });
