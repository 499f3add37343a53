// Package damage flips bits in, truncates and fills up the files of one controller of a real local cluster, and checks what the
// README promises: damaged state is never served and never votes, the controller says clearly what is wrong, the others go
// on, and one command rebuilds it.
package damage
