// Package notation reads and writes the short forms in which Slurm's world names many things at once: host lists
// ("n[1-4,7]"), run-length counts ("64(x2),32"), index lists ("0-7,16") and the bit masks that Muster stores.
//
// Invariants: Expand(Fold(names)) equals names, in order, for names without brackets, commas and blanks; leading zeros
// are part of a name and never lost or invented; nothing here allocates more than MaxNames names.
//
// Every room may import it. It never reads files, clocks or configuration.
package notation
