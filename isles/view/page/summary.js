// The top of the page: the numbers that matter most, and the table of all runs.

// What the cards speak about: of the runs that are compared with the reference, the one that sent least. Runs that
// stopped early come into question only if all have.
function subjectOf(runs, reference) {
  const sent = (run) => run.summary.bytes_sent || Infinity;
  const most = Math.max(...runs.map((run) => run.summary.tokens));
  const senders = runs.filter((run) => !run.alone);
  const others = (senders.length ? senders : runs).filter((run) => run.order !== reference);
  const complete = others.filter((run) => run.summary.tokens >= 0.99 * most);
  const rest = reference === null ? runs : [runs[reference]];
  const candidates = complete.length ? complete : others.length ? others : rest;
  return candidates.reduce((least, run) => (sent(run) < sent(least) ? run : least));
}

function card(name, value, detail) {
  const line = (kind, text) => element('span', { class: kind }, text);
  return element('div', { class: 'card' }, line('name', name), element('strong', {}, value), line('detail', detail));
}

function headline(runs, reference) {
  const subject = subjectOf(runs, reference);
  const base = reference === null ? null : runs[reference];
  if (!base || base === subject) return element('section', { class: 'headline' }, cardsAlone(subject.summary));
  const about = element(
    'p',
    { class: 'about' },
    swatch(subject),
    element('b', {}, subject.name),
    ' compared with ',
    swatch(base),
    element('b', {}, base.name),
  );
  return element('section', { class: 'headline' }, about, cardsAgainst(subject.summary, base.summary));
}

function cardsAlone(mine) {
  return element(
    'div',
    { class: 'cards' },
    card('Bytes sent', bytes(mine.bytes_sent), 'by all islands together'),
    card('Peak in one step', bytes(mine.peak_bytes_per_step), 'what the link has to carry'),
    card(
      'Validation loss',
      decimal(mine.val_loss),
      known(mine.val_loss) ? `${decimal(mine.val_bits_per_byte)} bits per byte` : 'not evaluated yet',
    ),
    card('Compute utilisation', percent(mine.compute_utilization), 'time not spent waiting'),
    card('Tokens per second', count(mine.tokens_per_second), `${duration(mine.wall_seconds)} in all`),
  );
}

function cardsAgainst(mine, theirs) {
  const sameTokens = Math.abs(mine.tokens - theirs.tokens) <= 0.01 * theirs.tokens;
  const fewer = mine.byte_ratio > 1.05;
  const peakRatio = mine.peak_bytes_per_step ? theirs.peak_bytes_per_step / mine.peak_bytes_per_step : 0;
  const speed = theirs.tokens_per_second ? mine.tokens_per_second / theirs.tokens_per_second : null;
  const instead = (own, other) => `${bytes(own)} instead of ${bytes(other)}`;
  const change = difference(mine.val_loss, theirs.val_loss);
  const notEvaluated = known(mine.val_loss) ? `${decimal(mine.val_bits_per_byte)} bits per byte` : 'not evaluated yet';
  return element(
    'div',
    { class: 'cards' },
    card(
      'Bytes sent',
      fewer ? `${times(mine.byte_ratio)} fewer` : bytes(mine.bytes_sent),
      fewer && !sameTokens
        ? 'for the same tokens'
        : fewer
          ? instead(mine.bytes_sent, theirs.bytes_sent)
          : `against ${bytes(theirs.bytes_sent)}`,
    ),
    card(
      'Peak in one step',
      peakRatio > 1.05 ? `${times(peakRatio)} lower` : bytes(mine.peak_bytes_per_step),
      peakRatio > 1.05
        ? instead(mine.peak_bytes_per_step, theirs.peak_bytes_per_step)
        : `against ${bytes(theirs.peak_bytes_per_step)}`,
    ),
    card(
      'Validation loss',
      decimal(mine.val_loss),
      change ? `${change} against ${decimal(theirs.val_loss)}` : notEvaluated,
    ),
    card('Compute utilisation', percent(mine.compute_utilization), `instead of ${percent(theirs.compute_utilization)}`),
    card(
      'Tokens per second',
      count(mine.tokens_per_second),
      speed > 1 ? `${times(speed)} as fast` : `against ${count(theirs.tokens_per_second)}`,
    ),
  );
}

function summaryTable(runs, reference, { bandwidths, everyday }) {
  const base = reference === null ? null : runs[reference].summary;
  const withWorth = runs.some((run) => known(run.summary.worth));
  const withLink = runs.length > 1 && runs.some((run) => run.link);
  const onLink = `On ${bandwidths[everyday][1]}`;
  const heads = [
    'Run',
    'Method',
    'Val loss',
    'Bits per byte',
    ...(withWorth ? ['Worth'] : []),
    'Bytes sent',
    'Fewer bytes',
    'Peak in a step',
    'Utilisation',
    'Tokens/s',
    'Wall clock',
    ...(withLink ? [onLink] : []),
  ];
  const explained = [
    withWorth &&
      'Worth: what the other islands add, as a share of what they add in data-parallel training; ' +
        '0 % is one island alone (final validation loss).',
    withLink && `${onLink}: planned time of all steps with such a link between islands, computing as fast as measured.`,
  ];
  const body = runs.map((run, index) => {
    const { summary } = run;
    const isBase = index === reference;
    const small = (text) => (text ? element('small', {}, text) : null);
    const cells = [
      [decimal(summary.val_loss), base && !isBase ? small(difference(summary.val_loss, base.val_loss)) : null],
      [decimal(summary.val_bits_per_byte)],
      ...(withWorth ? [[known(summary.worth) ? `${whole(100 * summary.worth).replace('-', '−')} %` : DASH]] : []),
      [bytes(summary.bytes_sent)],
      [
        base && summary.byte_ratio ? (isBase ? '1×' : times(summary.byte_ratio)) : DASH,
        isBase ? small('reference') : null,
      ],
      [bytes(summary.peak_bytes_per_step)],
      [percent(summary.compute_utilization)],
      [count(summary.tokens_per_second)],
      [duration(summary.wall_seconds)],
      ...(withLink ? [[duration(plannedSeconds(run, run.lastStep, everyday))]] : []),
    ];
    return element(
      'tr',
      {},
      element(
        'th',
        { scope: 'row' },
        element('span', { class: 'run-name' }, swatch(run), run.name),
        small(summary.finished ? null : `not finished: ${whole(summary.steps)} steps so far`),
      ),
      element('td', { class: 'text' }, run.method, small(knobs(run))),
      ...cells.map((cell, column) => element('td', { 'data-head': heads[column + 2] }, ...cell)),
    );
  });
  return element(
    'div',
    { class: 'table', tabindex: 0, role: 'region', 'aria-label': 'Summary of runs' },
    element(
      'table',
      { class: 'summary' },
      element(
        'thead',
        {},
        element(
          'tr',
          {},
          ...heads.map((head, index) => element('th', { scope: 'col', class: index < 2 ? 'text' : null }, head)),
        ),
      ),
      element('tbody', {}, ...body),
    ),
    ...explained.filter(Boolean).map((text) => element('p', { class: 'explained' }, text)),
  );
}

// The method in a few words.
function knobs(run) {
  if (run.alone) return 'one island alone';
  if (run.dataParallel) return 'gradients, every step';
  const parts = [];
  if (run.syncEvery) parts.push(`every ${run.syncEvery} steps`);
  if (run.fragments.length)
    parts.push(run.fragments.length === 1 ? 'whole model' : `${run.fragments.length} fragments`);
  if (run.knobs.codec) parts.push(String(run.knobs.codec));
  if (run.knobs.update && run.knobs.update !== 'fresh')
    parts.push(`${run.knobs.delay_rounds === 1 ? 'one round' : `${run.knobs.delay_rounds} rounds`} late`);
  else if (run.lateness) parts.push(`overlap ${run.lateness}`);
  const start = run.knobs.dense_start ?? [];
  if (start.length) parts.push(`after ${start.map(([rounds, steps]) => `${rounds} rounds of ${steps}`).join(', ')}`);
  return parts.join(', ');
}

function facts(runs) {
  const same = (values, format) =>
    [...new Set(values.filter((value) => value !== null && value !== undefined))].map(format);
  const line = [];
  const add = (values, word) => {
    if (values.length) line.push(`${values.join(' / ')} ${word}`);
  };
  add(
    same(
      runs.map((run) => run.parameters),
      count,
    ),
    'parameters',
  );
  add(
    same(
      runs.map((run) => run.layers),
      whole,
    ),
    'layers',
  );
  add(
    same(
      runs.map((run) => run.islands),
      whole,
    ),
    runs.every((run) => run.islands === 1) ? 'island' : 'islands',
  );
  add(
    same(
      runs.map((run) => run.summary.tokens),
      count,
    ),
    'tokens',
  );
  add(
    same(
      runs.map((run) => run.summary.steps),
      whole,
    ),
    'steps',
  );
  return line.join(' · ');
}
