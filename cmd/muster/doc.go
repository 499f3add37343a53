// Command muster is the command of users and operators: jobs, nodes, controllers, and local clusters for development.
//
// Invariants:
//   - Everything that a person can read, a program can have as JSON (--json): the API's messages in their JSON form
//     (field names in lower camel case, every field present), one object; streams print one object a line.
//   - Results go to stdout, everything else to stderr. Colour and width depend on the terminal only, never the contents.
//   - Exit codes: 0 done; 1 refused or failed; 2 wrong usage; 3 nobody answered, or the outcome is not known. `run`
//     returns the command's own.
//   - A mutation carries a request id that is minted once: whatever is retried below, it happens once.
package main
