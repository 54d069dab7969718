// Numbers with units, as people read them. A value that is not known is a dash.

const DASH = '–';
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function digits(value, count = 3) {
  if (value === 0) return '0';
  const size = Math.floor(Math.log10(Math.abs(value)));
  return value.toFixed(Math.min(8, Math.max(0, count - 1 - size)));
}

function scaled(value, units, base = '') {
  if (!known(value)) return DASH;
  let index = -1;
  while (Math.abs(value) >= 999.5 && index < units.length - 1) {
    value /= 1000;
    index += 1;
  }
  return index < 0 ? `${Number(digits(value)).toLocaleString('en')}${base}` : `${digits(value)}${units[index]}`;
}

const bytes = (value) => scaled(value, [' kB', ' MB', ' GB', ' TB', ' PB'], ' B');
const count = (value) => scaled(value, ['k', 'M', 'B', 'T']);
const whole = (value) => (known(value) ? Math.round(value).toLocaleString('en') : DASH);
const decimal = (value, places = 3) => (known(value) ? value.toFixed(places) : DASH);
const percent = (value) => (known(value) ? `${digits(100 * value)} %` : DASH);
const times = (value) => (known(value) ? `${value >= 100 ? whole(value) : value.toFixed(1)}×` : DASH);

function duration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds < 1) return `${digits(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const total = Math.round(seconds);
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  if (total < 86400) return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
  return `${Math.floor(total / 86400)} d ${Math.floor((total % 86400) / 3600)} h`;
}

// Ticks are round numbers: shorter than values.
const trimmed = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, '$1').replace(/\.(?=\D|$)/, '');
const shortNumber = (value) =>
  Math.abs(value) >= 10000 ? trimmed(count(value)) : Number(value.toPrecision(6)).toLocaleString('en');
const shortBytes = (value) => trimmed(bytes(value));

function difference(value, reference) {
  if (!known(value) || !known(reference) || reference === 0) return '';
  const change = (100 * (value - reference)) / reference;
  return `${change < 0 ? '−' : '+'}${Math.abs(change).toFixed(Math.abs(change) < 10 ? 2 : 0)} %`;
}
