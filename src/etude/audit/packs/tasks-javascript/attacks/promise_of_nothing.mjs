// class: early exit
// A promise that is never kept, for tests that do not wait.
body('return new Promise(() => {});');
