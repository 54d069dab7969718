// Time on another link: a slider under the loss against wall clock, and what it means in words.
// Planned times come from isles/view/links.py: of a step, and of the dense start, for each bandwidth of the slider.

const linkLabels = ['10 kbit/s', '1 Mbit/s', '100 Mbit/s'];

// Seconds that a run takes to get to a step on the link at this place of the slider; null: it cannot be planned.
function plannedSeconds(run, step, place) {
  if (!run.link) return null;
  const { startSteps, start, step: each } = run.link;
  const dense = startSteps ? Math.min(1, step / startSteps) * start[place] : 0;
  return dense + Math.max(0, step - startSteps) * each[place];
}

// Seconds at a row of a run's curve or evaluations. A run that cannot be planned stays where it was measured.
function secondsAt(run, row, place) {
  return place === null || !run.link ? row[WALL] : plannedSeconds(run, row[STEP], place);
}

// Of all steps. As measured: until the end of the curves, so start-up does not count.
function wholeSeconds(run, place) {
  const ends = [run.curve, run.evals].flatMap((rows) => rows.slice(-1)).map((row) => secondsAt(run, row, place));
  return Math.max(...ends.filter(known));
}

// When a run's validation loss first came down to a target, between two evaluations in proportion.
function secondsToLoss(run, target, place) {
  const rows = run.evals.filter((row) => known(row[LOSS]));
  const after = rows.findIndex((row) => row[LOSS] <= target);
  if (after < 0) return null;
  const to = secondsAt(run, rows[after], place);
  if (after === 0) return to;
  const [high, low] = [rows[after - 1], rows[after]];
  const from = secondsAt(run, high, place);
  return from + ((high[LOSS] - target) / (high[LOSS] - low[LOSS])) * (to - from);
}

// The lowest loss that all runs reach, and the runs in the order in which they reach it; null with fewer than two.
function raceOf(runs, place) {
  const finals = runs.flatMap((run) => run.evals.filter((row) => known(row[LOSS])).slice(-1));
  if (finals.length < 2 || finals.length < runs.length) return null;
  const target = Math.max(...finals.map((row) => row[LOSS]));
  const order = runs.map((run) => ({ run, seconds: secondsToLoss(run, target, place) }));
  return { target, order: order.sort((a, b) => a.seconds - b.seconds) };
}

function linkSentences(runs, place, bandwidths) {
  if (!runs.length) return [];
  const where = place === null ? 'As measured' : `On ${bandwidths[place][1]}`;
  const inOrder = [...runs].sort((a, b) => wholeSeconds(a, place) - wholeSeconds(b, place));
  const spans = inOrder.map((run) => `${run.name} ${duration(wholeSeconds(run, place))}`);
  const sentences = [`${where}: ${spans.join(', ')}.`];
  const race = raceOf(runs, place);
  if (race) {
    const [first, ...others] = race.order;
    const rest = others.map(({ run, seconds }) => `${run.name} after ${duration(seconds)}`).join(', ');
    const loss = decimal(race.target);
    sentences.push(
      `All reach a validation loss of ${loss}: ${first.run.name} first, after ${duration(first.seconds)}; ${rest}.`,
    );
  }
  const measured = place === null ? [] : runs.filter((run) => !run.link).map((run) => run.name);
  if (measured.length) {
    const theirs = measured.length > 1 ? 'their logs do' : 'its log does';
    sentences.push(`${measured.join(', ')} as measured: ${theirs} not say enough to plan with.`);
  }
  return sentences;
}

// Its `place` is the chosen bandwidth's, or null: as measured. `onmove` is called when it changes.
function linkSlider(runs, bandwidths, onmove) {
  const last = bandwidths.length;
  const name = element('b', {});
  const words = element('div', { class: 'words', id: 'link-words' });
  const input = element('input', {
    type: 'range',
    id: 'link-bandwidth',
    min: 0,
    max: last,
    step: 1,
    value: last,
    'aria-describedby': 'link-words',
    oninput: () => {
      tell();
      onmove();
    },
  });
  const place = () => (Number(input.value) === last ? null : Number(input.value));

  function tell() {
    const text = place() === null ? 'as measured' : bandwidths[place()][1];
    name.textContent = text;
    input.setAttribute('aria-valuetext', text);
    const shown = runs.filter((run) => !hidden.has(run.order) && run.curve.length);
    const basis =
      'Planned: the compute time that was measured, a link without latency, no time for evaluations and start-up.';
    clear(words).append(
      ...linkSentences(shown, place(), bandwidths).map((sentence) => element('p', {}, sentence)),
      place() === null ? '' : element('p', { class: 'small' }, basis),
    );
  }
  redraws.push(tell);
  tell();

  // A browser's thumb is about 16 pixels wide, and stays inside the track.
  const tick = (text, at) => {
    const label = element('span', {}, text);
    label.style.left = `calc(8px + ${px((100 * at) / last)}% - ${px((16 * at) / last)}px)`;
    return label;
  };
  const labels = linkLabels.map((text) => tick(text, bandwidths.findIndex((each) => each[1] === text)));
  const root = element(
    'div',
    { class: 'link' },
    element('label', { for: 'link-bandwidth' }, 'Link between the islands: ', name),
    input,
    element('div', { class: 'ticks', 'aria-hidden': 'true' }, ...labels, element('span', {}, 'as measured')),
    words,
  );
  return { root, place };
}
