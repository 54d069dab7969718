// Making elements. Strings always become text nodes, so nothing a run says can turn into markup.

const SVG_NAMESPACE = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

// An SVG as wide as its place. It marks itself as drawn once everything is in it.
function canvas(place, height, label) {
  const width = Math.max(240, Math.round(place.clientWidth || 600));
  const svg = shape('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label });
  place.querySelector(':scope > svg')?.remove();
  place.prepend(svg);
  return { svg, width, height };
}

function clear(node) {
  node.replaceChildren();
  return node;
}

// The part of a number or path that SVG needs: two decimals are finer than any screen.
const px = (value) => Math.round(value * 100) / 100;

// A mark for each run besides its colour, so that colour is never the only way to tell runs apart.
const MARKS = {
  circle: (x, y, r) => `M${px(x - r)},${px(y)}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0z`,
  square: (x, y, r) => `M${px(x - r)},${px(y - r)}h${2 * r}v${2 * r}h${-2 * r}z`,
  diamond: (x, y, r) =>
    `M${px(x)},${px(y - 1.3 * r)}l${1.3 * r},${1.3 * r}l${-1.3 * r},${1.3 * r}l${-1.3 * r},${-1.3 * r}z`,
  triangle: (x, y, r) => `M${px(x)},${px(y - 1.2 * r)}l${1.25 * r},${2.2 * r}h${-2.5 * r}z`,
};

function mark(run, x, y, radius, attributes = {}) {
  const names = Object.keys(MARKS);
  return shape('path', { d: MARKS[names[run.order % names.length]](x, y, radius), ...attributes });
}

function swatch(run) {
  const svg = shape('svg', { class: `swatch run-${run.slot}`, viewBox: '0 0 26 12', 'aria-hidden': 'true' });
  svg.append(shape('line', { class: 'line', x1: 1, x2: 25, y1: 6, y2: 6 }), mark(run, 13, 6, 3.4, { class: 'dot' }));
  return svg;
}
