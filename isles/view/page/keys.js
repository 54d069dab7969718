// Reading a chart by keyboard: the arrow keys move a point through it, as a pointer would, and its values are shown.

const KEY_STEP = 8; // pixels; with shift eight times as many
const DIRECTIONS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function readByKeys(plot, title) {
  plot.setAttribute('tabindex', '0');
  plot.setAttribute('role', 'group');
  plot.setAttribute('aria-label', `${title}: the arrow keys read its values`);
  let at = null; // in pixels
  let flight = null; // in the timeline: the number of the one that is pointed at
  const picture = () => plot.querySelector(':scope > svg');
  const within = (value, size) => Math.min(size - 1, Math.max(0, value));

  function point(kind, target, x, y) {
    target.dispatchEvent(new PointerEvent(kind, { bubbles: true, clientX: x, clientY: y, pointerType: 'key' }));
  }
  function stop() {
    const svg = picture();
    const flights = svg?.querySelector('.flights');
    if (flights && flight !== null) point('pointerout', flights, 0, 0);
    if (svg && at !== null) svg.dispatchEvent(new PointerEvent('pointerleave'));
    at = flight = null;
  }
  function moveToFlight(flights, direction) {
    const first = direction > 0 ? 0 : flights.length - 1;
    flight = flight === null ? first : within(flight + direction, flights.length);
    const frame = flights[flight].getBoundingClientRect();
    point('pointerover', flights[flight], frame.left + frame.width / 2, frame.top + frame.height / 2);
  }
  function move(svg, across, down) {
    const frame = svg.getBoundingClientRect();
    at ??= { x: across > 0 ? 0 : frame.width, y: frame.height / 2 };
    at = { x: within(at.x + across * KEY_STEP, frame.width), y: within(at.y + down * KEY_STEP, frame.height) };
    point('pointermove', svg, frame.left + at.x, frame.top + at.y);
  }
  plot.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') stop();
    const svg = picture();
    if (!DIRECTIONS[event.key] || event.target !== plot || !svg) return;
    const [across, down] = DIRECTIONS[event.key].map((each) => (event.shiftKey ? 8 : 1) * each);
    if (down && at === null) return; // the page scrolls as always
    event.preventDefault();
    const flights = svg.querySelectorAll('[data-flight]');
    if (flights.length) moveToFlight(flights, across);
    else move(svg, across, down);
  });
  plot.addEventListener('blur', stop);
}
