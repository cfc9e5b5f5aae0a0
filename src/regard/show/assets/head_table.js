/* The heads with their numbers, and the badges that follow from these.

     badge        number >= least, in a text of at least `keys` keys, unless another badge
                  implies it, and unless too few queries have the number
     behaviour    the badge whose number is the largest multiple of its threshold

   Statistics, thresholds and words come with the data (stats/registry.py): no name of a
   statistic stands here.

   Next: gallery.js */

/* A column that is no statistic: how many queries of a head have NaN. */
const NAN = {
  name: "nan_rows", label: "NaN", unit: "weight", summary: "queries with NaN in a number",
  badge: { label: "NaN", least: 1, keys: 0, light: "#c00000", dark: "#c00000" },
};

/* Every head of a sequence, with its numbers as soon as they are known. */
export function listHeads(meta, sequence) {
  const known = new Map(meta.table.map((row) => [placeOf(row), row]));
  return meta.records.filter((record) => record.sequence === sequence && record.nq && record.nk).flatMap(({ layer, heads, nk }) => {
    const few = findFew(meta, sequence, layer);
    return heads.map((head) => ({ sequence, layer, head, nk, few, ...known.get(placeOf({ sequence, layer, head })) }));
  });
}

/* One of them; without numbers if they are not known yet. */
export function rowOf(meta, { sequence, layer, head }) {
  return listHeads(meta, sequence).find((row) => row.layer === layer && row.head === head) ?? {};
}

function placeOf({ sequence, layer, head }) {
  return `${sequence}/${layer}/${head}`;
}

/* The numbers of a layer that too few of its queries have, by name. */
function findFew(meta, sequence, layer) {
  const here = (meta.few ?? []).filter((x) => x.sequence === sequence && x.layer === layer);
  return Object.fromEntries(here.map((x) => [x.statistic, x]));
}

/* Say that too few queries have a number; "" if there are enough. */
export function tellFew({ tooFew, enough, name }, rows) {
  const told = rows.filter((row) => row.few[name] || numberOf(row, name) !== null); // a decoder may not have it
  const few = told.map((row) => row.few[name]);
  if (!told.length || few.includes(undefined)) return "";
  const [{ count, queries }] = [...few].sort((a, b) => b.count - a.count);
  return `${tooFew}: ${count.toLocaleString("en-US")} of ${queries.toLocaleString("en-US")} queries, ${enough} needed`;
}

/* The columns of the table that have a badge. */
export function listBadges(meta) {
  return [NAN, ...meta.statistics.filter(({ badge }) => badge)];
}

/* Those of them that a head has, without what another badge implies. */
export function badgesOf(meta, row) {
  const found = listBadges(meta).filter(({ name, badge }) => row[name] >= badge.least && row.nk >= badge.keys && !row.few?.[name]);
  return found.filter(({ badge }) => !found.some(({ name }) => name === badge.unless));
}

/* The badge whose number is the largest multiple of its threshold; undefined without one. */
export function behaviourOf(meta, row) {
  const found = badgesOf(meta, row);
  const times = ({ name, badge }) => (name === NAN.name ? Infinity : row[name] / badge.least);
  return found.reduce((best, x) => (best && times(best) >= times(x) ? best : x), undefined);
}

/* The definition of a badge, in words. */
export function tellBadge(meta, { summary, unit, badge }) {
  const limit = `at least ${badge.least}${unit === "weight" ? "" : ` ${unit}`}`;
  const keys = badge.keys ? `, in texts of at least ${badge.keys} keys` : "";
  const other = meta.statistics.find(({ name }) => name === badge.unless);
  return `${summary}: ${limit}${keys}${other ? `, without the badge ${other.badge.label}` : ""}`;
}

/* A number, if a head has it and enough queries do. */
export function numberOf(row, name) {
  return row.few?.[name] ? null : (row[name] ?? null);
}

export function showNumber(x, digits = 3) {
  return x === null || x === undefined || Number.isNaN(x) ? "–" : Number(x.toPrecision(digits)).toString();
}

/* A number of the table: null is NaN if a query has it, else no query has the number. */
export function showValue(row, name) {
  if (row.few?.[name]) return "too few";
  return row[name] === null && row.nan_rows ? "NaN" : showNumber(row[name]);
}
