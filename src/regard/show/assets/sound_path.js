/* The path that aligns words with the time of a sound, as sound_path.py defines it.

     z[i, j] = (w[i, j] - mean over words) / (standard deviation over words)
     from (first word, first key) to (last word, last key), each step to the next word, the
     next key or both, with the largest sum of z

   Next: sound_view.js */

/* Return the first and the last key of each word. weights: (words, keys), row by row */
export function findTimes(weights, words, keys) {
  const z = standardise(weights, words, keys);
  const steps = new Uint8Array(words * keys);
  let above = new Float64Array(keys + 1).fill(-Infinity);
  above[0] = 0;
  for (let i = 0; i < words; i++) {
    const here = new Float64Array(keys + 1).fill(-Infinity);
    for (let j = 0; j < keys; j++) {
      const ways = [above[j], above[j + 1], here[j]]; // both, word, key
      const step = ways[1] > ways[0] ? (ways[2] > ways[1] ? 2 : 1) : ways[2] > ways[0] ? 2 : 0;
      steps[i * keys + j] = step;
      here[j + 1] = ways[step] + z[i * keys + j];
    }
    above = here;
  }
  const times = Array.from({ length: words }, () => [0, 0]);
  let [i, j] = [words - 1, keys - 1];
  times[i][1] = j;
  for (;;) {
    times[i][0] = j;
    if (!i && !j) return times;
    const step = steps[i * keys + j];
    if (step !== 1) j -= 1;
    if (step === 2) continue;
    i -= 1;
    times[i][1] = j;
  }
}

/* Weights of which each key has a mean of 0 and a variance of 1 over the words. */
function standardise(weights, words, keys) {
  const z = new Float64Array(weights.length);
  for (let j = 0; j < keys; j++) {
    let [sum, squares] = [0, 0];
    for (let at = j; at < z.length; at += keys) sum += weights[at];
    for (let at = j; at < z.length; at += keys) squares += (weights[at] - sum / words) ** 2;
    const size = Math.sqrt(squares / words);
    for (let at = j; size && at < z.length; at += keys) z[at] = (weights[at] - sum / words) / size;
  }
  return z;
}
