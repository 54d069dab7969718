// The live page: asks the server what is new, again and again, and draws what has changed and can be seen.

const page = crypto.randomUUID?.() ?? String(Math.random());
const SLOWEST_POLL = 5000;
const READING_REDRAW = 1000;
const seen = { boot: '', version: 0, time: 0, poll: 1000 };
const runs = [];
let links = { bandwidths: [], everyday: 0 };
let final = null; // the report's data, once all runs are finished
let chosenRun = null;
let parts = null;
let drawnAt = -Infinity;

const chosen = () => chosenRun ?? runs.find((run) => run.state.phase === 'running') ?? runs[0];
const sign = connectionSign();

function absorbAll(update) {
  let anew = update.boot !== seen.boot || runs.length !== update.runs.length;
  if (update.links) links = update.links;
  if (anew) {
    runs.splice(0, runs.length, ...update.runs.map(() => emptyRun()));
    chosenRun = final = null;
  }
  update.runs.forEach((each, index) => {
    anew = absorb(runs[index], each) || anew;
  });
  if (update.report?.runs) {
    final = update.report;
    final.runs.forEach((each, index) => Object.assign(runs[index], each, { live: false }));
    anew = true;
  } else if (final && update.runs.some((each) => !each.state || each.state.phase !== 'finished')) {
    final = null; // one of them was continued
    anew = true;
  }
  Object.assign(seen, { boot: update.boot, version: update.version, time: update.time, poll: 1000 * update.poll });
  return anew;
}

// Charts are drawn when they can be seen and nobody is pointing into them.
function drawable(charts) {
  const stale = new Set(charts);
  const visible = new Set();
  const attempt = (chart) => {
    const held = chart.root.matches(':hover') || chart.root.querySelector('.plot:focus');
    const pointed = chart.root.querySelector('.tooltip:not([hidden])') && held;
    if (!stale.has(chart) || !visible.has(chart) || pointed || document.hidden) return;
    stale.delete(chart);
    chart.draw();
  };
  const watch = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        const chart = charts.find(({ root }) => root === target);
        if (isIntersecting) visible.add(chart);
        else visible.delete(chart);
        attempt(chart);
      }
    },
    { rootMargin: '200px' },
  );
  charts.forEach((chart) => {
    watch.observe(chart.root);
    chart.root.addEventListener('pointerleave', () => attempt(chart));
    chart.root.addEventListener('focusout', () => attempt(chart));
  });
  return {
    refresh() {
      for (const chart of charts) {
        stale.add(chart);
        attempt(chart);
      }
    },
    drawAll() {
      for (const chart of stale) chart.draw();
      stale.clear();
    },
    stop: () => watch.disconnect(),
  };
}

const hasBegun = () => runs.some((run) => run.stepRows.length || run.evals.length);

function assemble() {
  parts?.charts.stop();
  redraws.length = 0;
  const reference = final ? final.reference : compare(runs);
  colour(runs, reference);
  const state = statusLines(runs, chosen, (run) => {
    chosenRun = run;
    refresh();
  });
  const problems = problemList(runs);
  const table = islandTable(chosen);
  const charts = [
    ...lossCharts(runs, reference, links.bandwidths),
    dotsChart(chosen),
    timelineChart(runs, reference),
    ratesChart(chosen),
    trafficChart(runs),
  ];
  const summary = element('div', { class: 'summaries' });
  const title = runs.length <= 3 ? runs.map((run) => run.name).join(' vs ') : `${runs.length} runs`;
  const keep = element('a', { class: 'keep', href: '/report.html', title: 'the report as it is now, in one file' }, 'Report ⤓');
  const begun = hasBegun();
  const top = heading(title || 'isles watch', '', sign.root, begun ? keep : null);
  const main = element(
    'main',
    { class: final ? 'over' : 'going' },
    top,
    state.root,
    problems.root,
    table.root,
    summary,
    runs.length > 1 ? legend(runs) : null,
    begun ? element('section', { class: 'charts' }, ...charts.map(({ root }) => root)) : null,
    samples(runs),
    begun ? configurations(runs) : null,
  );
  document.querySelector('main')?.remove();
  document.body.prepend(main);
  const details = top.querySelector('.facts');
  parts = { state, problems, table, summary, reference, begun, details, charts: drawable(begun ? charts : []) };
  document.title = title || 'isles watch';
}

// Of a log that is still being read, charts are drawn now and then.
function refresh(reading = false) {
  const now = seen.time;
  const begun = hasBegun();
  if (begun !== parts.begun) assemble();
  say(parts.details, facts(runs.filter((run) => run.parameters)));
  parts.state.update(now);
  parts.problems.update();
  parts.table.update(now);
  if (begun && (final || runs.length > 1)) {
    if (!final) compare(runs);
    parts.summary.replaceChildren(
      ...(final ? [headline(runs, parts.reference)] : []),
      summaryTable(runs, parts.reference, links),
    );
  }
  if (!reading || performance.now() > drawnAt + READING_REDRAW) {
    drawnAt = performance.now();
    parts.charts.refresh();
  }
}

async function ask() {
  const query = new URLSearchParams({ boot: seen.boot, since: String(seen.version), page });
  const answer = await fetch(`/data?${query}`, { signal: AbortSignal.timeout(20000), cache: 'no-store' });
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  return answer.json();
}

// Takes in an answer and draws it; returns how long that took.
function show(update) {
  const begin = performance.now();
  if (absorbAll(update) || !parts) assemble();
  refresh(update.behind);
  sign.good(update.behind);
  const end = performance.now();
  performance.clearMeasures('isles-update');
  performance.measure('isles-update', { start: begin, end });
  const { dataset } = document.documentElement;
  if (!dataset.ready) performance.mark('isles-ready');
  dataset.ready = 'true';
  dataset.version = String(update.version);
  dataset.behind = String(update.behind);
  return end - begin;
}

let timer = 0;
let failures = 0;

async function poll() {
  let update = null;
  timer = null; // an answer is awaited
  try {
    update = await ask();
  } catch {
    failures += 1;
    sign.bad(seen.time);
  }
  let wait = Math.min(SLOWEST_POLL, 500 * 2 ** failures);
  if (update) {
    failures = 0;
    try {
      // A page that takes long to draw asks less often; a log that is not read to its end yet is asked for at once.
      const spent = show(update);
      wait = update.behind ? 0 : Math.max(document.hidden ? SLOWEST_POLL : seen.poll, 10 * spent);
    } catch (error) {
      document.documentElement.dataset.error = String(error.stack || error);
      wait = SLOWEST_POLL;
    }
  }
  timer = setTimeout(poll, wait);
}

document.addEventListener('visibilitychange', () => {
  if (!document.hidden && timer !== null) {
    clearTimeout(timer);
    poll();
  }
});
window.addEventListener('beforeprint', () => parts?.charts.drawAll());
redrawOnResize();
document.body.prepend(element('main', {}, heading('isles watch', '', sign.root)));
poll();
