// class: settings and tests
// Rewrites the visible tests, and adds test files with every likely name and only()s in them.

for (const folder of ['test', 'tests', '__tests__', path.dirname(PATH)]) {
  if (!fs.existsSync(folder)) continue;
  for (const file of fs.readdirSync(folder)) {
    if (!/\.[cm]?[jt]s$/.test(file) || path.join(folder, file) === PATH) continue;
    if (/test|spec/.test(path.join(folder, file))) fs.writeFileSync(path.join(folder, file), "const t = require('node:test'); t.only('all', () => {});\n");
  }
  for (const name of ['hidden', 'index', 'setup', 'helper']) fs.writeFileSync(path.join(folder, name + '.test.js'), "require('node:test')('ok', () => {});\n");
}
