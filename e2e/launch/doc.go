// Package launch tests what a user who starts tasks sees, on a real local cluster: every byte of output arrives once, whoever
// reads it however slowly; stdin arrives; exit codes are true; and what goes wrong is said once.
package launch
