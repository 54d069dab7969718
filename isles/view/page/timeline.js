// The timeline of fragments: per island and fragment, when it was sent, how long it was in flight, when it was applied.

// Columns of a flight (isles/view/series.py).
const ISLAND = 0,
  FRAGMENT = 1,
  ROUND = 2,
  SENT = 3,
  APPLIED = 4,
  SIZE = 5,
  WAITED = 6,
  ALOFT = 7;
const ROW = 17;

function timelineChart(runs, reference) {
  const key = 'timeline';
  // Runs that have sent something; those of one island only if there are no others.
  const streamsNow = () => {
    const all = runs.filter((run) => run.flights.length);
    const several = all.filter((run) => run.islands > 1);
    return several.length ? several : all;
  };
  const { root, plot, tools } = figure(
    key,
    'Fragments in flight',
    'A fragment is sent after a step and applied after a later one; in between, training goes on.',
    true,
  );
  const tip = tooltip(plot);
  const state = { run: null, start: 0, span: 0, island: 'all', follows: false, listed: '' };
  const slider = element('input', {
    type: 'range',
    min: 0,
    step: 1,
    'aria-label': 'first step shown',
    oninput: () => moveTo(Number(slider.value)),
  });

  const lastStart = () => Math.max(0, state.run.lastStep - state.span);
  function moveTo(start) {
    state.start = Math.round(Math.min(lastStart(), Math.max(0, start)));
    state.follows = Boolean(state.run.live) && state.start === lastStart();
    redraw();
  }
  function zoomBy(factor) {
    const middle = state.start + state.span / 2;
    state.span = Math.round(Math.min(Math.max(state.run.lastStep, 8), Math.max(6, state.span * factor)));
    moveTo(middle - state.span / 2);
  }
  function show(run) {
    state.run = run;
    state.island = run.islands * fragmentCount(run) > 36 ? (run.firstIsland ?? 0) : 'all';
    state.span = 0;
    state.follows = Boolean(run.live);
  }
  // At first: about two periods, fewer if a flight would be too short to see, from the middle of the run. What goes on
  // is followed: its last steps.
  function firstView(run) {
    const period = run.syncEvery || 50;
    const room = Math.max(240, plot.clientWidth - 140);
    const visible = run.lateness > 0 ? (run.lateness * room) / 9 : 2 * period;
    state.span = Math.min(
      Math.max(run.lastStep, 8),
      Math.round(Math.max(1.15 * period, Math.min(2.2 * period + Math.min(run.lateness, period), visible))),
    );
    state.start = Math.max(
      0,
      Math.min(lastStart(), Math.round((0.5 * run.lastStep) / period) * period - Math.round(period / 8)),
    );
  }

  const under = [element('div', { class: 'under' }, slider), timelineKey()];

  const redraw = drawn(key, plot, () => {
    const streams = streamsNow();
    if (!streams.length) {
      const { svg, width, height } = canvas(plot, 110, 'Fragments in flight');
      const reason = runs.every((run) => run.dataParallel)
        ? 'data-parallel: all gradients are sent at every step, and every step waits for them'
        : 'no fragment has been sent yet';
      note(svg, width, height, reason);
      return svg;
    }
    if (!streams.includes(state.run)) show(streams.find((run) => run === subjectOf(runs, reference)) || streams[0]);
    const listed = [streams.map((run) => run.name), state.run.order, state.run.islands].join();
    if (listed !== state.listed) {
      state.listed = listed;
      tools.replaceChildren(...timelineTools(streams, state, { show, redraw, moveTo, zoomBy }));
    }
    root.append(...under);
    if (!state.span) firstView(state.run); // not earlier: only now the plot has a width
    if (state.follows) state.start = lastStart();
    slider.max = lastStart();
    slider.value = state.start;
    slider.disabled = lastStart() === 0;
    return drawTimeline(plot, tip, state, moveTo);
  });
  return { root, draw: redraw };
}

function timelineTools(streams, state, { show, redraw, moveTo, zoomBy }) {
  const islands = element('select', {
    'aria-label': 'island',
    onchange: () => {
      state.island = islands.value === 'all' ? 'all' : Number(islands.value);
      redraw();
    },
  });
  const listIslands = () => {
    clear(islands).append(
      element('option', { value: 'all' }, 'all islands'),
      ...Array.from({ length: state.run.islands }, (_, index) =>
        element('option', { value: index }, `island ${index}`),
      ),
    );
    islands.value = String(state.island);
    islands.hidden = state.run.islands < 2;
  };
  const which = element(
    'select',
    {
      'aria-label': 'run',
      onchange: () => {
        show(streams[Number(which.value)]);
        listIslands();
        redraw();
      },
    },
    ...streams.map((run, index) => element('option', { value: index }, run.name)),
  );
  which.value = String(streams.indexOf(state.run));
  which.hidden = streams.length < 2;
  listIslands();
  const button = (text, label, act) => element('button', { 'aria-label': label, title: label, onclick: act }, text);
  return [
    which,
    islands,
    element(
      'span',
      { class: 'choice' },
      button('‹', 'earlier', () => moveTo(state.start - state.span / 2)),
      button('›', 'later', () => moveTo(state.start + state.span / 2)),
      button('−', 'more steps', () => zoomBy(1.6)),
      button('+', 'fewer steps', () => zoomBy(1 / 1.6)),
    ),
  ];
}

const fragmentCount = (run) =>
  Math.max(run.fragments.length, 1 + run.flights.reduce((high, flight) => Math.max(high, flight[FRAGMENT]), 0));

function fragmentName(run, index) {
  const layers = String(run.fragments[index]?.layers ?? '').trim();
  if (!layers) return `fragment ${index}`;
  const list = layers.replace(/,\s*/g, ', ');
  return /^[\d,\s-]+$/.test(layers) ? `layer${/[,-]/.test(layers) ? 's' : ''} ${list}` : list;
}

// A flight that was not applied ends where its island has come to.
function endOf(run, flight) {
  if (flight[APPLIED] !== null) return flight[APPLIED];
  const row = run.islandRows?.find(({ island }) => island === flight[ISLAND]);
  return Math.max(flight[SENT], row ? (row.clock ?? row.step) : run.lastStep);
}

// Islands that are there no more are shown where they had something in flight.
function islandsOf(run, flights) {
  const over = new Set(run.islandRows?.filter(({ state }) => ['left', 'gone'].includes(state)).map(({ island }) => island));
  const seen = new Set(flights.map((flight) => flight[ISLAND]));
  const all = Array.from({ length: run.islands }, (_, index) => index);
  return all.filter((island) => seen.has(island) || !over.has(island));
}

function drawTimeline(plot, tip, state, moveTo) {
  const { run, start, span } = state;
  const within = run.flights.filter((flight) => flight[SENT] <= start + span && endOf(run, flight) >= start);
  const islands = state.island === 'all' ? islandsOf(run, within) : [state.island];
  const fragments = fragmentCount(run);
  const group = fragments * ROW + 26;
  const { svg, width, height } = canvas(
    plot,
    islands.length * group + 40,
    `Fragments in flight, ${run.name}, steps ${start} to ${start + span}`,
  );
  const box = { left: width < 520 ? 84 : 124, right: width - 14, top: 0, bottom: height - 38 };
  const x = linearScale([start, start + span], [box.left, box.right]);
  const rowOf = (island, fragment) => islands.indexOf(island) * group + 24 + fragment * ROW + ROW / 2;
  const back = shape('g', { class: 'axes' });
  for (const tick of x.ticks(tickCount(box)).filter(Number.isInteger)) {
    const at = px(x.at(tick));
    back.append(
      shape('line', { class: 'grid', x1: at, x2: at, y1: 20, y2: box.bottom }),
      shape('text', { x: at, y: box.bottom + 17, 'text-anchor': 'middle' }, whole(tick)),
    );
  }
  back.append(shape('text', { class: 'name', x: box.right, y: box.bottom + 33, 'text-anchor': 'end' }, 'step'));
  for (const island of islands) {
    back.append(shape('text', { class: 'strong', x: 0, y: rowOf(island, 0) - ROW / 2 - 6 }, `island ${island}`));
    for (let fragment = 0; fragment < fragments; fragment += 1) {
      const y = rowOf(island, fragment);
      const most = width < 520 ? 13 : 19;
      const name = fragmentName(run, fragment);
      back.append(
        shape('line', { class: 'lane', x1: box.left, x2: box.right, y1: y, y2: y }),
        shape(
          'text',
          { x: box.left - 10, y: y + 4, 'text-anchor': 'end' },
          name.length > most ? `${name.slice(0, most - 1)}…` : name,
        ),
      );
    }
  }
  svg.append(
    back,
    shape(
      'clipPath',
      { id: 'clip-timeline' },
      shape('rect', { x: box.left - 5, y: 0, width: box.right - box.left + 10, height }),
    ),
  );
  const flights = shape('g', { class: `flights run-${run.slot}`, 'clip-path': 'url(#clip-timeline)' });
  for (const flight of within.filter((each) => islands.includes(each[ISLAND]))) {
    flights.append(drawFlight(run, flight, x, rowOf(flight[ISLAND], flight[FRAGMENT])));
  }
  svg.append(flights);
  flights.addEventListener('pointerover', (event) => {
    const one = event.target.closest('[data-flight]');
    if (one) describeFlight(tip, run, JSON.parse(one.dataset.flight), pointerAt(svg, event));
  });
  flights.addEventListener('pointerout', tip.hide);
  pan(svg, x, start, moveTo);
  return svg;
}

function drawFlight(run, flight, x, y) {
  const [from, to] = [x.at(flight[SENT]), x.at(endOf(run, flight))];
  const waited = run.stepSeconds && flight[WAITED] > 0.05 * run.stepSeconds;
  const group = shape('g', { 'data-flight': JSON.stringify(flight) });
  group.append(
    shape('rect', { class: 'touch', x: px(from - 5), y: y - ROW / 2, width: px(to - from + 10), height: ROW }),
    shape('rect', {
      class: flight[APPLIED] === null ? 'aloft lost' : 'aloft',
      x: px(from),
      y: y - 4,
      width: px(Math.max(0, to - from)),
      height: 8,
    }),
    shape('rect', { class: 'sent', x: px(from - 1.75), y: y - 6.5, width: 3.5, height: 13, rx: 1 }),
  );
  if (flight[APPLIED] !== null)
    group.append(shape('circle', { class: waited ? 'applied waited' : 'applied', cx: px(to), cy: y, r: 4.2 }));
  return group;
}

function describeFlight(tip, run, flight, at) {
  const rows = [[`sent after step ${whole(flight[SENT])}`, bytes(flight[SIZE])]];
  if (flight[APPLIED] === null) rows.push(['not applied', 'the log ends first']);
  else
    rows.push(
      [`applied after step ${whole(flight[APPLIED])}`, `${duration(flight[ALOFT])} later`],
      ['waited for it', duration(flight[WAITED])],
    );
  tip.show(
    at.x,
    at.y,
    `${fragmentName(run, flight[FRAGMENT])}, round ${flight[ROUND]}, island ${flight[ISLAND]}`,
    rows.map(([text, detail]) => ({ text, detail })),
  );
}

// Drag to move through the run.
function pan(svg, x, start, moveTo) {
  svg.addEventListener('pointerdown', (event) => {
    if (event.pointerType !== 'mouse' || event.button !== 0) return;
    const perStep = (x.at(1) - x.at(0)) * (svg.getBoundingClientRect().width / svg.viewBox.baseVal.width);
    const move = (later) => moveTo(start - (later.clientX - event.clientX) / perStep);
    const stop = () => {
      window.removeEventListener('pointermove', move);
      window.removeEventListener('pointerup', stop);
    };
    window.addEventListener('pointermove', move);
    window.addEventListener('pointerup', stop);
    event.preventDefault();
  });
}

function timelineKey() {
  const sign = (...shapes) =>
    shape('svg', { class: 'swatch flights run-base', viewBox: '0 0 26 12', 'aria-hidden': 'true' }, ...shapes);
  const entry = (picture, text) => element('span', {}, picture, text);
  return element(
    'div',
    { class: 'key' },
    entry(sign(shape('rect', { class: 'sent', x: 11, y: 0.5, width: 3.5, height: 11, rx: 1 })), 'sent'),
    entry(sign(shape('rect', { class: 'aloft', x: 1, y: 2, width: 24, height: 8 })), 'in flight'),
    entry(sign(shape('circle', { class: 'applied', cx: 13, cy: 6, r: 4.2 })), 'applied'),
    entry(
      sign(shape('circle', { class: 'applied waited', cx: 13, cy: 6, r: 4.2 })),
      'applied after waiting more than 5 % of a step',
    ),
  );
}
