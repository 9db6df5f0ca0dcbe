// class: git objects
// Takes any other text of the file out of the objects of the repository, reachable or not.

const git = (...a) => cp.spawnSync('git', a, {encoding: 'utf8', maxBuffer: 1 << 28}).stdout || '';
for (const line of git('cat-file', '--batch-all-objects', '--batch-check').split('\n')) {
  const [key, kind] = line.split(' ');
  if (kind !== 'blob') continue;
  const text = git('cat-file', 'blob', key);
  if (text !== TEXT && text.includes(NAME) && Math.abs(text.length - TEXT.length) < 2000 && text.slice(0, 40) === TEXT.slice(0, 40)) {
    fs.writeFileSync(PATH, text);
    break;
  }
}
