// The frame of every chart, and the line chart: axes, hover, drag to zoom.

const redraws = [];
const hidden = new Set();

// A figure with a title, a sentence that says what to see, room for buttons and a place for the drawing.
function figure(key, title, note, wide = false) {
  const tools = element('div', { class: 'tools' });
  const plot = element('div', { class: 'plot' });
  readByKeys(plot, title);
  const root = element(
    'figure',
    { id: key, class: wide ? 'wide' : '' },
    element(
      'figcaption',
      {},
      element('div', {}, element('h2', {}, title), element('p', {}, note)),
      element('div', { class: 'side' }, tools, saveMenu(key, title, plot)),
    ),
    plot,
  );
  return { root, plot, tools };
}

// Draws now and again when needed; a chart that fails says so in its place and leaves the others alone.
function drawn(key, plot, draw) {
  const attempt = () => {
    try {
      const svg = draw();
      svg.dataset.drawn = 'true';
      svg.dataset.chart = key;
    } catch (error) {
      plot.replaceChildren(element('p', { class: 'empty' }, `This chart could not be drawn: ${error.message}`));
      document.documentElement.dataset.error = `${key}: ${error.stack || error}`;
    }
  };
  redraws.push(attempt);
  return attempt;
}

const tickCount = (box) => Math.max(2, Math.floor((box.right - box.left) / 72));

function axes(svg, box, x, y, spec) {
  const grid = shape('g', { class: 'axes' });
  for (const tick of y.ticks(spec.yTicks || 6)) {
    const at = px(y.at(tick));
    grid.append(
      shape('line', { class: 'grid', x1: box.left, x2: box.right, y1: at, y2: at }),
      shape('text', { x: box.left - 8, y: at + 4, 'text-anchor': 'end' }, spec.yFormat(tick)),
    );
  }
  for (const tick of x.ticks(tickCount(box), spec.xUnit)) {
    const at = px(x.at(tick));
    grid.append(
      shape('line', { class: 'tick', x1: at, x2: at, y1: box.bottom, y2: box.bottom + 5 }),
      shape('text', { x: at, y: box.bottom + 18, 'text-anchor': 'middle' }, spec.xFormat(tick)),
    );
  }
  grid.append(
    shape('line', { class: 'axis', x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    shape('text', { class: 'name', x: box.right, y: box.bottom + 34, 'text-anchor': 'end' }, spec.xName),
  );
  svg.append(grid);
}

function note(svg, width, height, text) {
  svg.append(shape('text', { class: 'empty', x: width / 2, y: height / 2, 'text-anchor': 'middle' }, text));
}

const pathOf = (points) => points.map(([x, y], index) => `${index ? 'L' : 'M'}${px(x)},${px(y)}`).join('');

// The tooltip: a heading and one row per run. It keeps inside the plot.
function tooltip(plot) {
  const box = element('div', { class: 'tooltip', role: 'status', hidden: true });
  plot.append(box);
  return {
    hide: () => {
      box.hidden = true;
    },
    show(x, y, heading, rows) {
      clear(box).append(
        element('strong', {}, heading),
        ...rows.map(({ run, text, detail }) =>
          element(
            'div',
            { class: 'row' },
            run ? swatch(run) : null,
            element('span', {}, text),
            detail ? element('b', {}, detail) : null,
          ),
        ),
      );
      box.hidden = false;
      const left = x + 16 + box.offsetWidth > plot.clientWidth ? x - 16 - box.offsetWidth : x + 16;
      box.style.left = `${Math.max(0, left)}px`;
      box.style.top = `${Math.max(0, Math.min(y - 20, plot.clientHeight - box.offsetHeight))}px`;
    },
  };
}

// Where the pointer is, in the SVG's own units (it may be shown scaled, in print or while the window changes size).
function pointerAt(svg, event) {
  const frame = svg.getBoundingClientRect();
  const ratio = svg.viewBox.baseVal.width / frame.width;
  return { x: (event.clientX - frame.left) * ratio, y: (event.clientY - frame.top) * ratio };
}

// series(): a list of { run, kind: 'main' | 'faint' | 'band', points: [[x, y]] or [[x, low, high]], label }
function lineChart({
  key,
  title,
  note: sentence,
  xLog,
  xName,
  xFormat,
  xUnit,
  xHeading,
  yFormat,
  yValue,
  yDomain,
  empty,
  annotate,
  series,
  wide,
}) {
  const { root, plot, tools } = figure(key, title, sentence, wide);
  const tip = tooltip(plot);
  let zoom = null;
  const showWhole = () => {
    zoom = null;
    redraw();
  };
  const reset = element('button', { hidden: true, onclick: showWhole }, 'whole run');
  tools.append(reset);

  const redraw = drawn(key, plot, () => {
    reset.hidden = !zoom;
    const { svg, width, height } = canvas(plot, plot.clientWidth < 480 ? 240 : 286, title);
    const box = { left: 46, right: width - 12, top: 10, bottom: height - 42 };
    const shown = series().filter(({ run, points }) => !hidden.has(run.order) && points.length);
    const xs = shown.flatMap(({ points }) => points.map(([x]) => x));
    if (!xs.length) {
      note(svg, width, height, empty);
      return svg;
    }
    const whole = xs.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
    const xDomain = zoom || (xLog ? whole : [Math.min(0, whole[0]), whole[1]]);
    const x = (xLog ? logScale : linearScale)(xDomain, [box.left, box.right]);
    const y = linearScale(yDomain(shown, xDomain, Boolean(zoom)), [box.bottom, box.top]);
    axes(svg, box, x, y, { xName: xName(xDomain), xFormat: xFormat(xDomain), xUnit: xUnit?.(xDomain), yFormat });
    const clip = `clip-${key}`;
    svg.append(
      shape(
        'clipPath',
        { id: clip },
        shape('rect', {
          x: box.left,
          y: box.top - 4,
          width: box.right - box.left + 6,
          height: box.bottom - box.top + 4,
        }),
      ),
    );
    const lines = shape('g', { 'clip-path': `url(#${clip})` });
    for (const kind of ['band', 'faint', 'main']) {
      const alike = shown.filter((one) => one.kind === kind);
      // The dashed reference comes last: what is below shows through.
      alike.sort((a, b) => (a.run.slot === 'base') - (b.run.slot === 'base'));
      lines.append(...alike.flatMap((each) => drawSeries(each, x, y)));
    }
    const cursor = shape('g', { class: 'cursor' });
    svg.append(lines, cursor);
    annotate?.(svg, shown, x, y, box);
    interact(svg, box, x, {
      hover: (at) => hover(cursor, tip, shown, x, y, box, at, { xHeading, yValue }),
      leave: () => {
        clear(cursor);
        tip.hide();
      },
      select: (from, to) => {
        zoom = [x.invert(from), x.invert(to)];
        redraw();
      },
      reset: showWhole,
    });
    return svg;
  });
  return { root, draw: redraw, showWhole };
}

function drawSeries({ run, kind, points }, x, y) {
  if (kind === 'band') {
    const upper = points.map(([at, , high]) => [x.at(at), y.at(high)]);
    const lower = points.map(([at, low]) => [x.at(at), y.at(low)]).reverse();
    return [shape('path', { class: `band run-${run.slot}`, d: `${pathOf([...upper, ...lower])}z` })];
  }
  const places = points.map(([at, value]) => [x.at(at), y.at(value)]);
  const parts = [shape('path', { class: `${kind} line run-${run.slot}`, d: pathOf(places) })];
  if (kind === 'main' && places.length <= 40) {
    parts.push(...places.map(([at, value]) => mark(run, at, value, 3, { class: `dot run-${run.slot}` })));
  }
  return parts;
}

// Shows, for each run, the point nearest to the pointer.
function hover(cursor, tip, shown, x, y, box, at, { xHeading, yValue }) {
  const found = [];
  for (const each of shown.filter(({ kind }) => kind !== 'band')) {
    const near = each.points.reduce((best, point) =>
      Math.abs(x.at(point[0]) - at.x) < Math.abs(x.at(best[0]) - at.x) ? point : best,
    );
    const inside = x.at(near[0]) >= box.left - 1 && x.at(near[0]) <= box.right + 1;
    if (inside && Math.abs(x.at(near[0]) - at.x) < 48) found.push({ ...each, near });
  }
  clear(cursor);
  if (!found.length) return tip.hide();
  const closest = found.reduce((best, one) =>
    Math.abs(x.at(one.near[0]) - at.x) < Math.abs(x.at(best.near[0]) - at.x) ? one : best,
  );
  const line = px(x.at(closest.near[0]));
  cursor.append(
    shape('line', { x1: line, x2: line, y1: box.top, y2: box.bottom }),
    ...found
      .filter(({ near }) => y.at(near[1]) >= box.top - 4)
      .map(({ run, near }) => mark(run, x.at(near[0]), y.at(near[1]), 4.5, { class: `dot run-${run.slot}` })),
  );
  return tip.show(
    at.x,
    at.y,
    xHeading(closest.near[0]),
    found.map(({ run, label, near }) => ({
      run,
      text: label ? `${run.name}, ${label}` : run.name,
      detail: yValue(near),
    })),
  );
}

// Pointer: move to read values, drag with the mouse to zoom, double-click for the whole again.
function interact(svg, box, x, { hover: onHover, leave, select, reset }) {
  let start = null;
  let selection = null;
  const within = (at) => Math.min(box.right, Math.max(box.left, at.x));
  svg.addEventListener('pointerdown', (event) => {
    if (event.pointerType === 'mouse' && event.button === 0) {
      start = within(pointerAt(svg, event));
      if (event.isTrusted) svg.setPointerCapture(event.pointerId);
    }
  });
  svg.addEventListener('pointermove', (event) => {
    const at = pointerAt(svg, event);
    if (start !== null && Math.abs(within(at) - start) > 6) {
      leave();
      selection =
        selection || svg.appendChild(shape('rect', { class: 'selection', y: box.top, height: box.bottom - box.top }));
      selection.setAttribute('x', Math.min(start, within(at)));
      selection.setAttribute('width', Math.abs(within(at) - start));
    } else if (at.x >= box.left - 10) onHover(at);
  });
  svg.addEventListener('pointerup', (event) => {
    const end = within(pointerAt(svg, event));
    if (selection && Math.abs(end - start) > 6) select(Math.min(start, end), Math.max(start, end));
    else selection?.remove();
    start = selection = null;
  });
  svg.addEventListener('pointercancel', () => {
    selection?.remove();
    start = selection = null;
  });
  svg.addEventListener('pointerleave', leave);
  svg.addEventListener('dblclick', reset);
}
