// The links: for each island what it sent (above its line) and received (below) over time.

const OF_STEPS = 0,
  OF_SENT = 1,
  OF_RECEIVED = 2;
const rate = (value) => `${bytes(value)}/s`;

function ratesChart(chosen) {
  const key = 'links';
  const { root, plot } = figure(
    key,
    'Links',
    'Bytes a second of each island over time: sent above its line, received below.',
    true,
  );
  const tip = tooltip(plot);
  const redraw = drawn(key, plot, () => {
    const run = chosen();
    const islands = run.islandRows.map((row) => row.island).filter((island) => run.rates.islands.has(island));
    const columns = Math.max(0, ...islands.map((island) => run.rates.islands.get(island).length));
    if (!columns) {
      const { svg, width, height } = canvas(plot, 90, 'Links');
      note(svg, width, height, 'nothing has been sent yet');
      return svg;
    }
    return drawRates(plot, tip, run, islands.sort((a, b) => a - b), columns);
  });
  return { root, draw: redraw };
}

function drawRates(plot, tip, run, islands, columns) {
  const strip = Math.max(9, Math.min(54, Math.round(480 / islands.length)));
  const roomy = strip >= 24;
  const { svg, width, height } = canvas(plot, islands.length * strip + 44, `Links of ${run.name}`);
  const box = { left: 62, right: width - (width > 520 && roomy ? 128 : 12), top: 4, bottom: height - 40 };
  const { width: stretch, islands: all } = run.rates;
  const x = linearScale([0, columns * stretch], [box.left, box.right]);
  const rows = new Map(islands.map((island) => [island, all.get(island)]));
  const most = [...rows.values()].flat().reduce((high, row) => Math.max(high, row[OF_SENT], row[OF_RECEIVED]), 1);
  const group = shape('g', { class: `axes run-${run.slot}` });
  const every = roomy ? 1 : strip > 13 ? 2 : 4;
  const totals = new Map(run.islandRows.map((row) => [row.island, row]));
  let [sent, received, lines] = ['', '', ''];
  islands.forEach((island, line) => {
    const middle = box.top + strip * (line + 0.5);
    const tall = (value) => px(((strip / 2 - 1) * value) / most);
    lines += `M${box.left},${px(middle)}H${px(box.right)}`;
    rows.get(island).forEach((row, column) => {
      const [from, wide] = [px(x.at(column * stretch)), px(x.at(stretch) - x.at(0))];
      if (row[OF_SENT]) sent += `M${from},${px(middle)}v${-tall(row[OF_SENT])}h${wide}v${tall(row[OF_SENT])}z`;
      if (row[OF_RECEIVED]) {
        received += `M${from},${px(middle)}v${tall(row[OF_RECEIVED])}h${wide}v${-tall(row[OF_RECEIVED])}z`;
      }
    });
    if (line % every === 0) {
      group.append(shape('text', { x: box.left - 8, y: middle + 4, 'text-anchor': 'end' }, `island ${island}`));
    }
    if (box.right < width - 20) {
      const { sent: up, received: down } = totals.get(island);
      group.append(
        shape('text', { x: box.right + 10, y: middle - 3 }, `↑ ${bytes(up)}`),
        shape('text', { x: box.right + 10, y: middle + 12 }, `↓ ${bytes(down)}`),
      );
    }
  });
  group.append(
    shape('path', { class: 'lane', d: lines }),
    shape('path', { class: 'bar', d: sent }),
    shape('path', { class: 'bar down', d: received }),
  );
  group.append(
    shape('text', { x: box.left, y: box.bottom + 34 }, `tallest bar: ${rate(most / stretch)}`),
  );
  svg.append(group);
  timeTicks(svg, box, x, columns * stretch);
  const cursor = svg.appendChild(shape('g', { class: 'cursor' }));
  svg.addEventListener('pointermove', (event) => {
    const at = pointerAt(svg, event);
    const [column, line] = [Math.floor(x.invert(at.x) / stretch), Math.floor((at.y - box.top) / strip)];
    clear(cursor);
    const row = rows.get(islands[line])?.[column];
    if (!row) return tip.hide();
    cursor.append(shape('line', { x1: px(at.x), x2: px(at.x), y1: box.top, y2: box.bottom }));
    return tip.show(at.x, at.y, `island ${islands[line]}, ${clockTime(run.rates.origin + column * stretch)}`, [
      { text: 'sent', detail: rate(row[OF_SENT] / stretch) },
      { text: 'received', detail: rate(row[OF_RECEIVED] / stretch) },
      { text: 'steps a second', detail: digits(row[OF_STEPS] / stretch) },
    ]);
  });
  svg.addEventListener('pointerleave', () => {
    clear(cursor);
    tip.hide();
  });
  return svg;
}

function timeTicks(svg, box, x, span) {
  const unit = timeUnit(span);
  const group = svg.appendChild(shape('g', { class: 'axes' }));
  for (const tick of x.ticks(tickCount(box), unit.size)) {
    const text = shortNumber(tick / unit.size);
    group.append(shape('text', { x: px(x.at(tick)), y: box.bottom + 18, 'text-anchor': 'middle' }, text));
  }
  group.append(
    shape('text', { class: 'name', x: box.right, y: box.bottom + 34, 'text-anchor': 'end' }, unit.name),
  );
}
