// The menu of a chart: save it as SVG or PNG, as it looks now, in the colours that are chosen.

// What an element of a chart looks like comes from style sheets; a file of its own has none.
const LOOKS = [
  'fill',
  'fill-opacity',
  'stroke',
  'stroke-width',
  'stroke-dasharray',
  'stroke-linejoin',
  'stroke-linecap',
  'opacity',
  'paint-order',
  'font-family',
  'font-size',
  'font-weight',
  'text-anchor',
  'visibility',
];
const TITLE_ROOM = 34;

// A copy that needs no style sheet.
function styled(svg) {
  const copy = svg.cloneNode(true);
  const [originals, copies] = [svg, copy].map((root) => [root, ...root.querySelectorAll('*')]);
  originals.forEach((original, index) => {
    const style = getComputedStyle(original);
    for (const name of LOOKS) copies[index].setAttribute(name, style.getPropertyValue(name));
  });
  return copy;
}

// The runs that are shown, for charts that tell them apart by their lines.
function savedLegend(svg, text) {
  const buttons = [...document.querySelectorAll('.legend button[aria-pressed="true"]')];
  if (buttons.length < 2 || !svg.querySelector('path.line')) return null;
  const group = shape('g', {});
  let x = 0;
  for (const button of buttons) {
    const sign = styled(button.querySelector('svg'));
    for (const [name, value] of Object.entries({ x, y: -24, width: 26, height: 12 })) sign.setAttribute(name, value);
    group.append(sign, shape('text', { ...text, x: x + 33, y: -14, 'font-size': 13 }, button.textContent));
    x += 33 + 8 * button.textContent.length + 22;
  }
  return group;
}

function standalone(svg, title) {
  const copy = styled(svg);
  copy.querySelectorAll('.cursor, .selection, .touch').forEach((node) => node.remove());
  const { width, height } = svg.viewBox.baseVal;
  const body = getComputedStyle(document.body);
  const text = { x: 0, y: -14, fill: body.color, 'font-family': body.fontFamily };
  const runs = savedLegend(svg, text);
  const room = runs ? 2 * TITLE_ROOM - 10 : TITLE_ROOM;
  const whole = [-8, -room, width + 16, height + room + 8];
  const fill = getComputedStyle(svg.closest('figure')).backgroundColor;
  copy.prepend(
    shape('rect', { x: whole[0], y: whole[1], width: whole[2], height: whole[3], fill }),
    shape('text', { ...text, y: 20 - room, 'font-size': 15, 'font-weight': 600 }, title),
    ...(runs ? [runs] : []),
  );
  copy.setAttribute('viewBox', whole.join(' '));
  copy.setAttribute('width', whole[2]);
  copy.setAttribute('height', whole[3]);
  copy.setAttribute('xmlns', SVG_NAMESPACE);
  return { text: new XMLSerializer().serializeToString(copy), width: whole[2], height: whole[3] };
}

function download(blob, name) {
  const link = element('a', { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function png({ text, width, height }, scale = 2) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await picture.decode();
  const sheet = element('canvas', { width: Math.round(scale * width), height: Math.round(scale * height) });
  sheet.getContext('2d').drawImage(picture, 0, 0, sheet.width, sheet.height);
  return new Promise((resolve) => {
    sheet.toBlob(resolve, 'image/png');
  });
}

function saveMenu(key, title, plot) {
  const drawing = () => standalone(plot.querySelector(':scope > svg'), title);
  const entry = (text, act) =>
    element(
      'button',
      {
        role: 'menuitem',
        onclick: () => {
          toggle(false);
          act();
        },
      },
      text,
    );
  const menu = element(
    'div',
    { class: 'menu', role: 'menu', hidden: true },
    entry('Save as SVG', () => download(new Blob([drawing().text], { type: 'image/svg+xml' }), `${key}.svg`)),
    entry('Save as PNG', async () => download(await png(drawing()), `${key}.png`)),
  );
  const opener = element(
    'button',
    {
      class: 'opener',
      title: 'save this chart',
      'aria-label': `save the chart ${title}`,
      'aria-haspopup': 'menu',
      'aria-expanded': 'false',
      onclick: () => toggle(menu.hidden),
    },
    '⤓',
  );
  function toggle(open) {
    menu.hidden = !open;
    opener.setAttribute('aria-expanded', String(open));
    if (open) menu.firstElementChild.focus();
  }
  const root = element('div', { class: 'save' }, opener, menu);
  root.addEventListener('keydown', (event) => {
    const entries = [...menu.children];
    const at = entries.indexOf(document.activeElement);
    if (event.key === 'Escape') {
      toggle(false);
      opener.focus();
    } else if (!menu.hidden && (event.key === 'ArrowDown' || event.key === 'ArrowUp')) {
      entries[(at + (event.key === 'ArrowDown' ? 1 : entries.length - 1)) % entries.length].focus();
      event.preventDefault();
    }
  });
  root.addEventListener('focusout', (event) => {
    if (!root.contains(event.relatedTarget)) toggle(false);
  });
  return root;
}
