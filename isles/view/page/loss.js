// Loss against tokens, bytes and wall clock, and utilisation: four line charts of the same runs.

// Columns of a run's curve and of its evaluations (isles/view/series.py, isles/view/report.py).
const STEP = 0,
  TOKENS = 1,
  BYTES = 2,
  WALL = 3,
  LOSS = 4,
  LEAST = 5,
  MOST = 6;

// `xOf(run, row)`: where a row is on the x axis; null: nowhere.
function lossSeries(runs, xOf) {
  return runs.flatMap((run) => {
    const usable = (rows) => rows.filter((row) => known(xOf(run, row)) && known(row[LOSS]));
    const evals = usable(run.evals).map((row) => [xOf(run, row), row[LOSS]]);
    const curve = usable(run.curve);
    const training = curve.map((row) => [xOf(run, row), row[LOSS]]);
    return [
      { run, kind: 'band', points: curve.map((row) => [xOf(run, row), row[LEAST], row[MOST]]) },
      { run, kind: evals.length ? 'faint' : 'main', label: 'training', points: training },
      { run, kind: 'main', label: 'validation', points: evals },
    ];
  });
}

// From just below the best loss to where training was after its first stretch: the fall from a random model would
// otherwise flatten every difference. Of a zoomed chart, and of a logarithmic axis, everything is shown.
// `each`: a run's first stretch is measured on its own line, so that runs of very different length show alike.
function lossDomain(skip, each = false) {
  return (shown, [from, to], zoomed) => {
    const lines = shown
      .filter(({ kind }) => kind !== 'band')
      .map(({ points }) => points.filter(([x]) => x >= from && x <= to));
    const late = lines.flatMap((points) => {
      const end = each && points.length ? points[points.length - 1][0] : to;
      const cut = zoomed ? from : from + skip * (end - from);
      const rest = points.filter(([x]) => x >= cut);
      return (rest.length ? rest : points.slice(-1)).map(([, y]) => y);
    });
    if (!late.length) return [0, 1];
    const low = late.reduce((a, b) => Math.min(a, b));
    const high = late.reduce((a, b) => Math.max(a, b));
    const pad = (high - low) * 0.08 || Math.abs(high) * 0.05 || 0.5;
    return [low - pad, high + pad];
  };
}

function lossChart(runs, key, xOf, title, sentence, axis) {
  return lineChart({
    key,
    title,
    note: sentence,
    empty: 'no steps yet',
    yFormat: (tick) => String(Number(tick.toPrecision(6))),
    yValue: ([, loss]) => decimal(loss, 4),
    yDomain: lossDomain(0.08),
    series: () => lossSeries(runs, xOf),
    ...axis,
  });
}

// An arrow from where the reference ends to where the run of the headline ends, and how many times fewer bytes that is.
function fewerBytes(runs, reference) {
  const base = reference === null ? null : runs[reference];
  const other = subjectOf(runs, reference);
  return (svg, shown, x, y, box) => {
    const end = (run) =>
      shown
        .filter((one) => one.run === run && one.kind === 'main')
        .map(({ points }) => points[points.length - 1])
        .pop();
    const [from, to] = base && other ? [end(base), end(other)] : [];
    if (!from || !to || Math.abs(other.summary.tokens - base.summary.tokens) > 0.01 * base.summary.tokens) return;
    const [right, left] = [x.at(from[0]) - 8, x.at(to[0]) + 8];
    if (right - left < 110 || left < box.left || right > box.right) return;
    const level = px(Math.min(box.bottom - 6, (y.at(from[1]) + y.at(to[1])) / 2));
    svg.append(
      shape(
        'g',
        { class: 'arrow' },
        shape('path', { d: `M${px(right)},${level}H${px(left)}m6,-4l-6,4l6,4` }),
        shape(
          'text',
          { x: px((left + right) / 2), y: level - 8, 'text-anchor': 'middle' },
          `${times(from[0] / to[0])} fewer bytes`,
        ),
      ),
    );
  };
}

function wallChart(runs, bandwidths, withSlider) {
  const slider = withSlider ? linkSlider(runs, bandwidths, () => chart.showWhole()) : null;
  const chart = lossChart(
    runs,
    'loss-wall',
    (run, row) => secondsAt(run, row, slider ? slider.place() : null),
    'Loss against wall clock',
    'What is learned in the same time, waiting for the network included.',
    {
      xName: ([, to]) => timeUnit(to).name,
      xFormat:
        ([, to]) =>
        (tick) =>
          shortNumber(tick / timeUnit(to).size),
      xHeading: duration,
      xUnit: ([, to]) => timeUnit(to).size,
      yDomain: lossDomain(0.08, true),
      wide: withSlider,
    },
  );
  if (slider) chart.root.append(slider.root);
  return chart;
}

function lossCharts(runs, reference, bandwidths) {
  // The slider for the link needs a run whose time depends on it.
  const withSlider = runs.some((run) => run.link && !run.alone);
  return [
    lossChart(
      runs,
      'loss-tokens',
      (run, row) => row[TOKENS],
      'Loss against tokens',
      'What is learned from the same amount of text.',
      {
        xName: () => 'tokens',
        xFormat: () => shortNumber,
        xHeading: (x) => `${count(x)} tokens`,
      },
    ),
    lossChart(
      runs,
      'loss-bytes',
      (run, row) => row[BYTES] || null,
      'Loss against bytes sent',
      'What is learned for the traffic: further left is cheaper. Logarithmic.',
      {
        xLog: true,
        xName: () => 'bytes sent by all islands',
        xFormat: () => shortBytes,
        xHeading: (x) => `${bytes(x)} sent`,
        yDomain: lossDomain(0),
        empty: 'nothing has been sent',
        annotate: fewerBytes(runs, reference),
      },
    ),
    wallChart(runs, bandwidths, withSlider),
    lineChart({
      key: 'utilization',
      wide: withSlider, // the two stand side by side, or each in a row of its own
      title: 'Compute utilisation',
      note: 'The share of the time in which islands compute instead of waiting for the network.',
      xName: () => 'step',
      xFormat: () => shortNumber,
      xHeading: (x) => `around step ${whole(x)}`,
      empty: 'no steps yet',
      yFormat: (tick) => `${Math.round(100 * tick)} %`,
      yValue: ([, value]) => percent(value),
      yDomain: () => [0, 1.02],
      series: () =>
        runs.map((run) => ({
          run,
          kind: 'main',
          points: run.utilization.map(([first, last, value]) => [(first + last) / 2, value]),
        })),
    }),
  ];
}
