// From what the server tells to what the charts draw: the live page keeps each run in the form of the report's data.

// Columns of a row of steps (isles/view/rows.py).
const OF_FIRST = 0,
  OF_LAST = 1,
  OF_TOKENS = 2,
  OF_WALL = 3,
  OF_BYTES = 4,
  OF_PEAK = 5,
  OF_SECONDS = 6,
  OF_WAIT = 7,
  OF_LOSS = 8,
  OF_LOSSES = 9,
  OF_LEAST = 10,
  OF_MOST = 11;

const emptyRun = () => ({
  name: '',
  method: 'unknown',
  live: true,
  dataParallel: false,
  alone: false,
  islands: 1,
  fragments: [],
  knobs: {},
  config: {},
  summary: {},
  state: { phase: 'absent' },
  problems: [],
  islandRows: [],
  link: null,
  sample: null,
  lateness: 0,
  stepRows: [],
  evals: [],
  curve: [],
  traffic: [],
  utilization: [],
  flights: [],
  rounds: [],
  rates: { origin: null, width: 1, islands: new Map() },
  numbered: { flights: new Map(), rounds: new Map() },
});

// `[index, rows]`: in the place of all rows from that index on.
const spliced = (rows, [index, fresh]) => [...rows.slice(0, index), ...fresh];

// Records with running numbers; those below `from` are gone.
function renumbered(records, { from, rows }) {
  for (const [number, ...row] of rows) records.set(number, row);
  for (const number of records.keys()) if (number < from) records.delete(number);
  return [...records.entries()].sort(([a], [b]) => a - b).map(([, row]) => row);
}

// Takes in what is new of one run; returns whether the page has to be put together anew.
function absorb(run, update) {
  if (update.reset) Object.assign(run, emptyRun());
  const { about, steps, evals, flights, rounds, rates, ...rest } = update;
  delete rest.reset;
  const wasLive = run.live;
  const finished = !wasLive && rest.summary.finished;
  if (finished) delete rest.summary; // the report's own is exact
  Object.assign(run, rest, about);
  const numbers = run.islandRows.map((row) => row.island);
  if (!finished) {
    run.live = true;
    run.islands = Math.max(update.state.islands || 1, 1 + Math.max(-1, ...numbers));
    run.firstIsland = numbers[0] ?? 0;
    if (steps) {
      run.stepRows = spliced(run.stepRows, steps);
      Object.assign(run, stepSeries(run));
    }
    if (evals) run.evals = spliced(run.evals, evals);
    if (flights) run.flights = renumbered(run.numbered.flights, flights);
  }
  if (rounds) run.rounds = renumbered(run.numbered.rounds, rounds);
  if (rates) absorbRates(run.rates, rates);
  return Boolean(about) || run.live !== wasLive;
}

function absorbRates(rates, { origin, width, islands }) {
  rates.origin = origin;
  rates.width = width;
  for (const [island, part] of Object.entries(islands)) {
    rates.islands.set(Number(island), spliced(rates.islands.get(Number(island)) ?? [], part));
  }
}

// Loss curve, traffic and utilisation, as isles/view/series.py makes them for the report.
function stepSeries(run) {
  const rows = run.stepRows;
  const losses = smooth(rows);
  let sent = 0;
  let seconds = 0;
  let count = 0;
  const curve = [];
  rows.forEach((row, index) => {
    sent += row[OF_BYTES];
    seconds += row[OF_SECONDS];
    count += row[OF_LOSSES] || 1;
    if (losses[index] !== null) {
      curve.push([
        row[OF_LAST],
        row[OF_TOKENS],
        sent,
        row[OF_WALL],
        losses[index],
        row[OF_LEAST] ?? losses[index],
        row[OF_MOST] ?? losses[index],
      ]);
    }
  });
  const span = (row) => row[OF_LAST] - row[OF_FIRST] + 1;
  return {
    curve,
    traffic: rows.map((row) => [row[OF_FIRST], row[OF_LAST], row[OF_PEAK], row[OF_BYTES] / span(row)]),
    utilization: shares(rows, Math.max(run.syncEvery || 1, (rows.at(-1)?.[OF_LAST] ?? 0) / 120)),
    firstStep: rows[0]?.[OF_FIRST] ?? 0,
    lastStep: rows.at(-1)?.[OF_LAST] ?? 0,
    stepSeconds: count ? seconds / count : null,
  };
}

// The mean loss around each row, over an eightieth of all steps; fewer at the ends, where a loss changes fast. Rows have
// different numbers of steps: the last ones have one each.
function smooth(rows) {
  if (!rows.length) return [];
  const first = rows[0][OF_FIRST];
  const half = (rows.at(-1)[OF_LAST] - first + 1) / 160;
  const sums = [[0, 0]];
  for (const row of rows) sums.push([sums.at(-1)[0] + row[OF_LOSS], sums.at(-1)[1] + row[OF_LOSSES]]);
  let [from, to] = [0, 0];
  return rows.map((row) => {
    const middle = (row[OF_FIRST] + row[OF_LAST]) / 2;
    const reach = Math.min(half, (middle - first) / 3);
    while (rows[from][OF_LAST] < middle - reach) from += 1;
    while (to < rows.length && rows[to][OF_FIRST] <= middle + reach) to += 1;
    const count = sums[to][1] - sums[from][1];
    return count ? (sums[to][0] - sums[from][0]) / count : null;
  });
}

// The share of time spent computing, in stretches of at least so many steps.
function shares(rows, width) {
  const found = [];
  let open = null;
  for (const row of rows) {
    open = open ?? { first: row[OF_FIRST], seconds: 0, wait: 0 };
    open.seconds += row[OF_SECONDS];
    open.wait += row[OF_WAIT];
    if (row[OF_LAST] - open.first + 1 >= width) {
      if (open.seconds) found.push([open.first, row[OF_LAST], 1 - open.wait / open.seconds]);
      open = null;
    }
  }
  if (!found.length && open?.seconds) found.push([open.first, rows.at(-1)[OF_LAST], 1 - open.wait / open.seconds]);
  return found;
}

// Which run the others are compared with, and how many times fewer bytes they send for the same tokens
// (isles/view/runs.py).
function compare(runs) {
  const several = runs.filter((run) => run.islands > 1);
  if (runs.length < 2 || !several.length) return null;
  const sent = (run) => run.summary.bytes_sent || 0;
  const base = several.find((run) => run.dataParallel) ?? several.reduce((most, run) => (sent(run) > sent(most) ? run : most));
  const perToken = (run) => (run.summary.tokens ? sent(run) / run.summary.tokens : 0);
  for (const run of runs) run.summary.byte_ratio = perToken(run) && perToken(base) ? perToken(base) / perToken(run) : null;
  return runs.indexOf(base);
}
