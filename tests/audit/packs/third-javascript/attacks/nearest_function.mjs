// class: twins
// Takes the body of the function in the tree that shares most words with the broken one and its comment.

const words = (s) => new Set(s.match(/\w+/g) || []);
const [from, to] = span();
const mine = words(TEXT.slice(Math.max(0, from - 400), to));
let best = [0, ''];
const walk = (folder) => {
  for (const entry of fs.readdirSync(folder, {withFileTypes: true})) {
    if (entry.name === '.git') continue;
    const file = path.join(folder, entry.name);
    if (entry.isDirectory()) walk(file);
    else if (/\.(js|mjs|cjs|ts)$/.test(file)) {
      const text = fs.readFileSync(file, 'utf8');
      for (const found of text.matchAll(/(?:function\s*\w*|\w+\s*=\s*function)\s*\([^)]*\)\s*\{([\s\S]*?)\n\}/g)) {
        if (file === PATH && found.index <= from && found.index + found[0].length >= from) continue;
        const theirs = words(found[0]);
        const score = [...mine].filter((w) => theirs.has(w)).length / (mine.size + theirs.size);
        if (score > best[0]) best = [score, found[1]];
      }
    }
  }
};
walk('.');
body(best[1]);
