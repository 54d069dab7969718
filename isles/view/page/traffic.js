// Bytes per step: one strip per run, all on the same axes. A bar is the most that was sent in one step of its bucket.

// Columns of a run's traffic (isles/view/series.py), and of the bars made of it.
const FIRST = 0,
  LAST = 1,
  PEAK = 2,
  MEAN = 3;
const STRIP = 98;

function trafficChart(runs) {
  const key = 'traffic';
  const title = 'Bytes per step';
  const sentence = 'What all islands together put on the wire in one step: the peak is what the link has to carry.';
  const { root, plot, tools } = figure(key, title, sentence, true);
  const tip = tooltip(plot);
  let [logarithmic, zoom] = [true, null];
  const reset = element(
    'button',
    {
      onclick: () => {
        zoom = null;
        redraw();
      },
    },
    'whole run',
  );
  const kinds = [
    ['logarithmic', true],
    ['linear', false],
  ].map(([text, value]) => [
    element(
      'button',
      {
        onclick: () => {
          logarithmic = value;
          redraw();
        },
      },
      text,
    ),
    value,
  ]);
  tools.append(reset, element('span', { class: 'choice' }, ...kinds.map(([button]) => button)));

  const redraw = drawn(key, plot, () => {
    reset.hidden = !zoom;
    kinds.forEach(([button, value]) => button.setAttribute('aria-pressed', String(value === logarithmic)));
    const visible = runs.filter((run) => !hidden.has(run.order) && run.traffic.length);
    const senders = visible.filter((run) => run.summary.bytes_sent > 0);
    const shown = senders.length ? senders : visible;
    const { svg, width, height } = canvas(plot, Math.max(1, shown.length) * STRIP + 42, title);
    const sent = shown.flatMap((run) => run.traffic.map((row) => row[PEAK])).filter((value) => value > 0);
    if (!sent.length) {
      note(svg, width, height, shown.length ? 'nothing has been sent' : 'no steps yet');
      return svg;
    }
    const box = { left: 62, right: width - 12, top: 10, bottom: height - 40 };
    const x = linearScale(zoom || [0, Math.max(...shown.map((run) => run.lastStep))], [box.left, box.right]);
    const [least, most] = [sent.reduce((a, b) => Math.min(a, b)), sent.reduce((a, b) => Math.max(a, b))];
    // Bars on a logarithmic scale have no natural zero: they stand some way below the smallest message.
    const yDomain = logarithmic ? [least / 4, most * 1.6] : [0, most * 1.12];
    const strips = shown.map((run, index) => {
      const range = [(index + 1) * STRIP - 6, index * STRIP + 26];
      const bars = barsOf(run, x, Math.floor((box.right - box.left) / 3));
      strip(svg, run, bars, box, x, (logarithmic ? logScale : linearScale)(yDomain, range));
      return { run, bars };
    });
    stepTicks(svg, box, x);
    const cursor = svg.appendChild(shape('g', { class: 'cursor' }));
    interact(svg, box, x, {
      hover: (at) => hoverTraffic(cursor, tip, strips, box, x, at),
      leave: () => {
        clear(cursor);
        tip.hide();
      },
      select: (from, to) => {
        zoom = [Math.floor(x.invert(from)), Math.ceil(x.invert(to))];
        redraw();
      },
      reset: () => {
        zoom = null;
        redraw();
      },
    });
    return svg;
  });
  return { root, draw: redraw };
}

function stepTicks(svg, box, x) {
  const group = svg.appendChild(shape('g', { class: 'axes' }));
  for (const tick of x.ticks(tickCount(box)).filter(Number.isInteger)) {
    group.append(shape('text', { x: px(x.at(tick)), y: box.bottom + 18, 'text-anchor': 'middle' }, shortNumber(tick)));
  }
  group.append(shape('text', { class: 'name', x: box.right, y: box.bottom + 34, 'text-anchor': 'end' }, 'step'));
}

// The rows inside the axis, gathered into at most `most` bars of equally many steps: the highest peak, the mean of all.
function barsOf(run, x, most) {
  const [start, end] = x.domain;
  const interval = (run.syncEvery || 1) / Math.max(1, run.fragments.length);
  let size = Math.max(1, Math.ceil((end - start) / most));
  // Bars a little shorter than the interval between sends would miss one now and then: a beat that is not there.
  if (size > 1 && size > interval / 2) size = Math.ceil(Math.max(size, interval));
  const bars = new Map();
  for (const row of run.traffic) {
    for (
      let bar = Math.floor((Math.max(row[FIRST], start + 1) - 1) / size);
      bar * size < Math.min(row[LAST], end);
      bar += 1
    ) {
      const steps = Math.min(row[LAST], (bar + 1) * size) - Math.max(row[FIRST], bar * size + 1) + 1;
      const old = bars.get(bar) || [bar * size + 1, 0, 0, 0];
      const total = old[MEAN] * (old[LAST] ? old[LAST] - old[FIRST] + 1 : 0) + row[MEAN] * steps;
      const last = Math.min(row[LAST], (bar + 1) * size);
      bars.set(bar, [old[FIRST], last, Math.max(old[PEAK], row[PEAK]), total / (last - old[FIRST] + 1)]);
    }
  }
  return [...bars.values()];
}

function hoverTraffic(cursor, tip, strips, box, x, at) {
  const step = x.invert(at.x);
  const under = ({ run, bars }) => ({ run, bar: bars.find((one) => step >= one[FIRST] - 1 && step < one[LAST]) });
  const found = strips.map(under).filter(({ bar }) => bar);
  clear(cursor);
  if (!found.length || at.x < box.left) return tip.hide();
  const [first, last] = found[0].bar;
  cursor.append(shape('line', { x1: px(at.x), x2: px(at.x), y1: 8, y2: box.bottom }));
  const detail = (bar) =>
    bar[FIRST] === bar[LAST] ? bytes(bar[PEAK]) : `${bytes(bar[PEAK])} at most, mean ${bytes(bar[MEAN])}`;
  return tip.show(
    at.x,
    at.y,
    first === last ? `step ${whole(first)}` : `steps ${whole(first)} to ${whole(last)}`,
    found.map(({ run, bar }) => ({ run, text: run.name, detail: detail(bar) })),
  );
}

function strip(svg, run, bars, box, x, y) {
  const group = shape('g', { class: `axes run-${run.slot}` });
  const floor = y.at(y.domain[0]);
  const peak = run.traffic.reduce((high, row) => Math.max(high, row[PEAK]), 0);
  const sum = run.traffic.reduce((total, row) => total + row[MEAN] * (row[LAST] - row[FIRST] + 1), 0);
  const mean = sum / run.traffic.reduce((total, row) => total + row[LAST] - row[FIRST] + 1, 0);
  for (const tick of y.ticks(3)) {
    const at = px(y.at(tick));
    group.append(
      shape('line', { class: 'grid', x1: box.left, x2: box.right, y1: at, y2: at }),
      shape('text', { x: box.left - 8, y: at + 4, 'text-anchor': 'end' }, shortBytes(tick)),
    );
  }
  let outline = '';
  for (const bar of bars.filter((each) => each[PEAK] > 0)) {
    const left = Math.max(box.left, x.at(bar[FIRST] - 1));
    const wide = Math.min(box.right, x.at(bar[LAST])) - left;
    const gap = wide > 6 ? 1 : 0;
    outline += `M${px(left)},${px(floor)}V${px(y.at(bar[PEAK]))}h${px(wide - gap)}V${px(floor)}z`;
  }
  group.append(
    shape('path', { class: 'bar', d: outline }),
    shape('line', { class: 'axis', x1: box.left, x2: box.right, y1: floor, y2: floor }),
  );
  const narrow = box.right - box.left < 340;
  const title = shape('text', { class: 'strip-name', x: narrow ? 0 : box.left, y: y.at(y.domain[1]) - 8 });
  title.append(
    shape('tspan', { class: 'strong' }, run.name),
    shape('tspan', { dx: 10 }, `peak ${bytes(peak)}`),
    shape('tspan', { dx: 10 }, `mean ${bytes(mean)}${narrow ? '' : ' a step'}`),
  );
  group.append(title);
  svg.append(group);
}
