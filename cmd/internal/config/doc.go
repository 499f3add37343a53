// Package config reads what people write: configuration files, memory sizes and times, in the notation of the field.
// The commands use it; it never talks to a cluster.
package config
