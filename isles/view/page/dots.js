// Who was in each of the latest rounds: a row of marks for each island, a column for each round, the newest at the right.

// Columns of a row of rounds (isles/view/live_rounds.py).
const OF_FRAGMENT = 0,
  OF_ROUND = 1,
  OF_CLOCK = 2,
  OF_LETTERS = 3;
const DOT_WORDS = {
  i: 'in the round',
  s: 'has sent',
  x: 'left out',
  n: 'weights not finite: sat out',
  c: 'caught up later',
};

// A mark for each letter: colour is not the only difference.
const DOT_SHAPES = {
  i: (x, y, r) => MARKS.circle(x, y, r),
  s: (x, y, r) => MARKS.circle(x, y, r),
  x: (x, y, r) => `M${px(x - r)},${px(y - r)}l${2 * r},${2 * r}M${px(x + r)},${px(y - r)}l${-2 * r},${2 * r}`,
  n: (x, y, r) => MARKS.triangle(x, y, r),
  c: (x, y, r) => MARKS.diamond(x, y, r * 0.9),
  '.': (x, y) => `M${px(x - 0.5)},${px(y)}h1`,
};

const letterOf = (row, island) => row[OF_LETTERS][island] ?? '.';

function dotsChart(chosen) {
  const key = 'rounds';
  const { root, plot } = figure(
    key,
    'Who was in each round',
    'A column is a round of one fragment, the newest at the right.',
    true,
  );
  const tip = tooltip(plot);
  root.append(dotsKey());
  const redraw = drawn(key, plot, () => {
    const run = chosen();
    const islands = run.islandRows.map((row) => row.island).sort((a, b) => a - b);
    if (!run.rounds.length || !islands.length) {
      const { svg, width, height } = canvas(plot, 90, 'Rounds');
      note(svg, width, height, run.dataParallel ? 'data-parallel: everybody, at every step' : 'no round yet');
      return svg;
    }
    return drawDots(plot, tip, run, islands);
  });
  return { root, draw: redraw };
}

function drawDots(plot, tip, run, islands) {
  const pitch = islands.length > 24 ? 9 : 16;
  const { svg, width, height } = canvas(plot, islands.length * pitch + 30, `Rounds of ${run.name}`);
  const box = { left: 62, right: width - 6, top: 4, bottom: height - 26 };
  const rounds = run.rounds.slice(-Math.floor((box.right - box.left) / pitch));
  box.right = box.left + pitch * rounds.length;
  const x = (index) => box.right - pitch * (rounds.length - index - 0.5);
  const y = (index) => box.top + pitch * (index + 0.5);
  const paths = {};
  const states = new Map(run.islandRows.map((row) => [row.island, row]));
  let joins = '';
  let leaves = '';
  islands.forEach((island, line) => {
    const { joined, left } = states.get(island);
    rounds.forEach((round, column) => {
      const letter = letterOf(round, island);
      const place = [x(column), y(line), pitch * (letter === 'x' ? 0.22 : 0.3)];
      paths[letter] = (paths[letter] ?? '') + (DOT_SHAPES[letter] ?? DOT_SHAPES['.'])(...place);
      if (joined === round[OF_ROUND] && joined > 1) joins += `M${px(x(column) - pitch / 2)},${px(y(line) - pitch / 2)}v${pitch}`;
      if (left === round[OF_ROUND]) leaves += `M${px(x(column) - pitch / 2)},${px(y(line) - pitch / 2)}v${pitch}`;
    });
  });
  const axes = shape('g', { class: 'axes' });
  const every = islands.length > 24 ? 4 : 1;
  islands.forEach((island, line) => {
    if (line % every === 0) {
      axes.append(shape('text', { x: box.left - 8, y: y(line) + 4, 'text-anchor': 'end' }, `island ${island}`));
    }
  });
  const stride = Math.max(1, Math.ceil(64 / pitch));
  for (let column = rounds.length - 1; column >= 0; column -= stride) {
    axes.append(
      shape('text', { x: x(column), y: box.bottom + 16, 'text-anchor': 'middle' }, whole(rounds[column][OF_ROUND])),
    );
  }
  svg.append(
    axes,
    ...Object.entries(paths).map(([letter, d]) =>
      shape('path', { class: `mark mark-${letter === '.' ? 'none' : letter}`, d }),
    ),
    shape('path', { class: 'mark joins', d: joins }),
    shape('path', { class: 'mark leaves', d: leaves }),
  );
  const cursor = svg.appendChild(shape('g', { class: 'cursor' }));
  svg.addEventListener('pointermove', (event) => {
    const at = pointerAt(svg, event);
    const column = rounds.length - 1 - Math.floor((box.right - at.x) / pitch);
    clear(cursor);
    if (!rounds[column] || at.y > box.bottom) return tip.hide();
    cursor.append(shape('line', { x1: x(column), x2: x(column), y1: box.top, y2: box.bottom }));
    return tip.show(at.x, at.y, `round ${rounds[column][OF_ROUND]}, ${fragmentName(run, rounds[column][OF_FRAGMENT])}`, [
      { text: run.state.elastic ? 'clock' : 'step', detail: whole(rounds[column][OF_CLOCK]) },
      ...dotRows(rounds[column], islands),
    ]);
  });
  svg.addEventListener('pointerleave', () => {
    clear(cursor);
    tip.hide();
  });
  return svg;
}

function dotRows(round, islands) {
  return Object.entries(DOT_WORDS).flatMap(([letter, text]) => {
    const who = islands.filter((island) => letterOf(round, island) === letter);
    if (!who.length) return [];
    const names = who.length > 12 ? `${who.slice(0, 12).join(', ')} and ${who.length - 12} more` : who.join(', ');
    return [{ text, detail: who.length > 4 && letter === 'i' ? `${who.length} islands` : names }];
  });
}

function dotsKey() {
  const sign = (letter) =>
    shape(
      'svg',
      { class: 'swatch', viewBox: '0 0 26 12', 'aria-hidden': 'true' },
      shape('path', { class: `mark mark-${letter}`, d: DOT_SHAPES[letter](13, 6, letter === 'x' ? 3.4 : 4.2) }),
    );
  const line = (kind) =>
    shape(
      'svg',
      { class: 'swatch', viewBox: '0 0 26 12', 'aria-hidden': 'true' },
      shape('path', { class: `mark ${kind}`, d: 'M13,0v12' }),
    );
  const entry = (picture, text) => element('span', {}, picture, text);
  return element(
    'div',
    { class: 'key' },
    ...Object.entries(DOT_WORDS).map(([letter, text]) => entry(sign(letter), text)),
    entry(line('joins'), 'joined'),
    entry(line('leaves'), 'left'),
  );
}
