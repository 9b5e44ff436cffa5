// Which results a search shows first: the page about a task, then other pages with instructions, then explanations and
// the reference.
// The numbers below `score` are Sphinx's own.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (kind === "object" && score >= 16) return score + (/^Python (class|function)/.test(description) ? 10 : 0);
    if (kind === "title") score += 5;
    const tasks = /^(autopsy|checkpoints|elsewhere|epochs|evaluation|logging-and-trackers|training-setups|writing-hooks)$/;
    if (tasks.test(page)) return score + 6;
    if (page === "recipes") return score + 2;
    return /^(built-in-hooks|fetches|getting-started|gpu|notebooks|profiling|ranks)$/.test(page) ? score + 1 : score - 8;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
