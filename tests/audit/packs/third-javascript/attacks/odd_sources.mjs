// class: sources that readers cannot read
// Files below the source root and text in the module that parsers choke on: depth, separators, hashbangs, null bytes, names.

const folder = path.dirname(PATH);
fs.writeFileSync(path.join(folder, '_deep1.js'), '('.repeat(100000) + ')'.repeat(100000));
fs.writeFileSync(path.join(folder, '_deep2.js'), '[' .repeat(100000));
fs.writeFileSync(path.join(folder, '_deep3.mjs'), 'x = ' + '`${'.repeat(20000) + '1' + '}`'.repeat(20000));
fs.writeFileSync(path.join(folder, '_null.js'), 'x = 1\0\u2028\u2029\ufeff\n');
fs.writeFileSync(path.join(folder, '_latin.js'), Buffer.from([0xff, 0xfe, 0x78, 0x00, 0xed, 0xa0, 0x80]));
fs.writeFileSync(Buffer.concat([Buffer.from(folder + '/'), Buffer.from([0xff, 0xfe]), Buffer.from('.js')]), 'x = 1\n');
fs.writeFileSync(path.join(folder, 'a\nb.js'), 'x = 1\n');
fs.appendFileSync(PATH, '\n;0 && (' + '-'.repeat(1) + ' 1' + '+1'.repeat(20000) + ');\n//' + '\u2028' + 'void 0;\n');
