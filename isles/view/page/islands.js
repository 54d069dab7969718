// Islands as rows: where each is, how fast, what crosses its link, whether it is in the rounds.

const COLUMNS = [
  ['Island', ''],
  ['State', ''],
  ['Step', 'and the clock, where islands come and go'],
  ['Loss', ''],
  ['Tokens/s', 'over its last steps'],
  ['Pace', 'steps over time'],
  ['Utilisation', 'share of the time spent computing'],
  ['Waiting', 'for the network, in a step'],
  ['Up', 'bytes sent'],
  ['Down', 'bytes received'],
  ['Slack', 'how long before it is due a result arrives; negative: the island waits for it'],
  ['Last event', ''],
];
const SPARK = { width: 84, height: 18 };

const stateWords = (row) =>
  ({
    in: 'in',
    out: row.outInARow === 1 ? `out of round ${row.outSince}` : `out of ${row.outInARow} rounds, since ${row.outSince}`,
    left: row.left ? `left before round ${row.left}` : 'left',
    gone: 'ended',
    silent: 'silent',
    joined: 'joined, in no round yet',
    done: 'done',
  })[row.state] ?? row.state;

// Below a twentieth of a millisecond it is nothing.
const seconds = (value) => {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  return `${value < 0 ? '−' : ''}${size < 5e-5 ? '0 ms' : duration(size)}`;
};

function cellsOf(row, now) {
  const clock = known(row.clock) && row.clock !== row.step ? ` · ${whole(row.clock)}` : '';
  return [
    `${whole(row.step)}${clock}`,
    decimal(row.loss),
    count(row.tokensPerSecond),
    null,
    percent(row.utilization),
    seconds(row.waitSeconds),
    bytes(row.sent),
    bytes(row.received),
    seconds(row.slack),
    known(row.lastTime) ? ago(now - row.lastTime) : DASH,
  ];
}

// Steps per stretch of time, of the latest stretches; the last one is not over yet.
function sparkPath(rates, island) {
  const rows = (rates.islands.get(island) ?? []).slice(-60);
  if (rows.length < 3) return '';
  const values = rows.slice(0, -1).map(([steps]) => steps);
  const most = Math.max(...values, 1);
  const x = (index) => px((index * SPARK.width) / (values.length - 1));
  return pathOf(values.map((value, index) => [x(index), px(SPARK.height - 2 - ((SPARK.height - 4) * value) / most)]));
}

function islandRow(number) {
  const spark = shape('path', { class: 'spark' });
  const picture = shape(
    'svg',
    { viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, width: SPARK.width, height: SPARK.height, 'aria-hidden': 'true' },
    spark,
  );
  const state = element('span', { class: 'word' });
  const cells = COLUMNS.slice(2).map(([head]) => element('td', { 'data-head': head }));
  cells[3].append(picture);
  cells[3].className = 'pace';
  const name = element('span', {}, `island ${number}`);
  const host = element('small', {});
  const root = element(
    'tr',
    {},
    element('th', { scope: 'row' }, name, host),
    element('td', { class: 'text' }, element('i', { class: 'lamp' }), state),
    ...cells,
  );
  function update(row, rates, now) {
    if (root.dataset.state !== row.state) root.dataset.state = row.state;
    say(state, stateWords(row));
    say(host, row.host);
    cellsOf(row, now).forEach((text, index) => {
      if (text !== null) say(cells[index], text);
    });
    const tight = known(row.slack) && row.slack < 0;
    cells[8].classList.toggle('tight', tight);
    const path = sparkPath(rates, row.island);
    if (spark.getAttribute('d') !== path) spark.setAttribute('d', path);
  }
  return { root, update };
}

function islandTable(chosen) {
  const body = element('tbody', {});
  const caption = element('h2', {});
  const heads = COLUMNS.map(([head, title], index) =>
    element('th', { scope: 'col', title: title || null, class: index < 2 ? 'text' : null }, head),
  );
  const root = element(
    'section',
    { class: 'islands', hidden: true },
    caption,
    element(
      'div',
      { class: 'table', tabindex: 0, role: 'region', 'aria-label': 'Islands' },
      element('table', { class: 'rows' }, element('thead', {}, element('tr', {}, ...heads)), body),
    ),
  );
  let rows = new Map();
  let of = null;
  function update(now) {
    const run = chosen();
    if (run !== of) rows = new Map();
    of = run;
    root.hidden = !run.islandRows.length;
    const present = run.islandRows.filter((row) => row.state !== 'left').length;
    const gone = run.islandRows.length - present;
    say(caption, `Islands${gone ? `: ${present} here, ${gone} ${gone === 1 ? 'has' : 'have'} left` : ''}`);
    // Of those that have left, the last few.
    const shown = [...run.islandRows.slice(0, present), ...run.islandRows.slice(present).slice(-12)];
    const kept = new Map(shown.map((row) => [row.island, rows.get(row.island) ?? islandRow(row.island)]));
    const order = [...kept.values()].map((each) => each.root);
    const same = order.length === body.children.length && order.every((each, index) => body.children[index] === each);
    if (!same) body.replaceChildren(...order);
    rows = kept;
    for (const row of shown) kept.get(row.island).update(row, run.rates, now);
  }
  return { root, update };
}
