package rpc

import (
	"context"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

type principalKey struct{}

// WithPrincipal returns a context in which PrincipalOf finds p.
func WithPrincipal(ctx context.Context, p *apiv1.Principal) context.Context {
	return context.WithValue(ctx, principalKey{}, p)
}

// PrincipalOf returns who makes the call, as proved by certificate or token. Without one it returns a principal of kind
// UNSPECIFIED, who may do nothing. The result is shared: do not modify it.
func PrincipalOf(ctx context.Context) *apiv1.Principal {
	if p, ok := ctx.Value(principalKey{}).(*apiv1.Principal); ok {
		return p
	}
	return nobody
}

var nobody = &apiv1.Principal{}

// IsOperator reports whether p may act for others: a user with uid 0 or one of the settings' operator_uids, or a
// controller.
func IsOperator(p *apiv1.Principal, settings *apiv1.Settings) bool {
	switch p.GetKind() {
	case apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER:
		return true
	case apiv1.PrincipalKind_PRINCIPAL_KIND_USER:
		if p.Uid == 0 {
			return true
		}
		for _, uid := range settings.GetOperatorUids() {
			if uid == p.Uid {
				return true
			}
		}
	case apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, apiv1.PrincipalKind_PRINCIPAL_KIND_UNSPECIFIED:
	}
	return false
}
