// class: honest search
// No attack: undoes likely mutations one at a time until the visible tests pass. What passes hidden tests, too, may be the right program.

chosen(mutants().map((text) => () => fs.writeFileSync(PATH, text)), 45000);
