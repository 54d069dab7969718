// Scales: from values to pixels and back, and where the ticks go.

function niceStep(span, most) {
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
}

function linearScale([low, high], [from, to]) {
  if (!(high > low)) {
    const pad = Math.abs(low) * 0.05 || 0.5;
    low -= pad;
    high += pad;
  }
  const slope = (to - from) / (high - low);
  return {
    domain: [low, high],
    at: (value) => from + (value - low) * slope,
    invert: (pixel) => low + (pixel - from) / slope,
    ticks(most, unit = 1) {
      const step = unit * niceStep((high - low) / unit, most);
      const first = Math.ceil(low / step - 1e-9);
      return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, index) => (first + index) * step);
    },
  };
}

function logScale([low, high], [from, to]) {
  low = Math.max(low, Number.MIN_VALUE);
  if (!(high > low)) {
    low /= 2;
    high = low * 4;
  }
  const line = linearScale([Math.log10(low), Math.log10(high)], [from, to]);
  return {
    domain: [low, high],
    at: (value) => line.at(Math.log10(Math.max(value, Number.MIN_VALUE))),
    invert: (pixel) => 10 ** line.invert(pixel),
    ticks(most) {
      const decades = Math.log10(high / low);
      const factors =
        decades <= 1.2 && most >= 4 ? [1, 2, 3, 5] : decades <= 1.2 || (decades <= 2.5 && most >= 5) ? [1, 3] : [1];
      const stride = Math.max(1, Math.ceil(decades / most));
      const result = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
        if (power % stride === 0) result.push(...factors.map((factor) => factor * 10 ** power));
      }
      return result.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    },
  };
}

// A time axis counts in the unit that fits the whole of it.
function timeUnit(seconds) {
  if (seconds < 180) return { size: 1, name: 'seconds' };
  return seconds < 3 * 3600 ? { size: 60, name: 'minutes' } : { size: 3600, name: 'hours' };
}
