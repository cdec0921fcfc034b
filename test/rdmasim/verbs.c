// SPDX-License-Identifier: GPL-2.0
/*
 * The verbs: enough for ib_core to call the device a kernel verbs provider, so
 * that the mad, umad, cm and cma clients attach as they do to a real adapter.
 * Objects exist, nothing is ever transferred.
 */
#include <linux/slab.h>
#include <linux/version.h>
#include <rdma/ib_mad.h>
#include <rdma/uverbs_ioctl.h>

#include "rdmasim.h"

struct sim_ucontext { struct ib_ucontext ibuc; };
struct sim_pd { struct ib_pd ibpd; };
struct sim_cq { struct ib_cq ibcq; spinlock_t lock; struct list_head done; };
struct sim_qp {
	struct ib_qp ibqp;
	struct ib_qp_attr attr;
	struct ib_qp_init_attr init;
	struct list_head posted;	/* receives, under the lock of the receive CQ */
};
/* A receive that was posted. Nothing ever arrives: it ends when its QP does. */
struct sim_recv { struct list_head entry; struct ib_qp *qp; u64 wr_id; };
struct sim_ah { struct ib_ah ibah; };

static int sim_query_device(struct ib_device *ibdev, struct ib_device_attr *attr,
			    struct ib_udata *udata)
{
	*attr = (struct ib_device_attr) {
		.fw_ver = 1,
		.sys_image_guid = to_sim_ib(ibdev)->guid,
		.max_mr_size = ~0ull,
		.page_size_cap = PAGE_SIZE,
		.kernel_cap_flags = IBK_LOCAL_DMA_LKEY,
		.max_qp = 1024,
		.max_qp_wr = 1024,
		.max_send_sge = 16,
		.max_recv_sge = 16,
		.max_sge_rd = 16,
		.max_cq = 1024,
		.max_cqe = 4096,
		.max_mr = 1024,
		.max_pd = 1024,
		.max_ah = 1024,
		.max_pkeys = 1,
		.local_ca_ack_delay = 15,
	};
	return 0;
}

/* A port that follows a netdev is up when the netdev is; any other always. */
static bool sim_port_is_up(struct sim_ib *ib, u32 port)
{
	struct net_device *ndev;
	bool up;

	if (!ib->follows_netdev || port != 1)
		return true;
	rcu_read_lock();
	ndev = rcu_dereference(ib->ndev[port - 1]);
	up = ndev && netif_running(ndev) && netif_carrier_ok(ndev);
	rcu_read_unlock();
	return up;
}

static int sim_query_port(struct ib_device *ibdev, u32 port, struct ib_port_attr *attr)
{
	struct sim_ib *ib = to_sim_ib(ibdev);
	bool up = sim_port_is_up(ib, port);

	/* attr comes zeroed; subnet_prefix and the like are ib_core's. */
	attr->state = ib->ib_link ? READ_ONCE(ib->ib_state) : up ? IB_PORT_ACTIVE : IB_PORT_DOWN;
	attr->phys_state = up && attr->state != IB_PORT_DOWN ? IB_PORT_PHYS_STATE_LINK_UP : IB_PORT_PHYS_STATE_DISABLED;
	attr->max_mtu = IB_MTU_4096;
	attr->active_mtu = ib->ib_link ? IB_MTU_4096 : IB_MTU_1024;
	attr->gid_tbl_len = SIM_GID_TABLE;
	attr->ip_gids = !ib->ib_link;
	attr->port_cap_flags = IB_PORT_CM_SUP;
	attr->max_msg_sz = 0x80000000;
	attr->pkey_tbl_len = 1;
	attr->max_vl_num = 1;
	attr->active_width = IB_WIDTH_4X;
	attr->active_speed = IB_SPEED_EDR;
	if (ib->ib_link) {
		attr->lid = port;
		attr->sm_lid = 1;
	}
	return 0;
}

static int sim_modify_port(struct ib_device *ibdev, u32 port, int mask,
			   struct ib_port_modify *props)
{
	return 0;
}

static int sim_get_port_immutable(struct ib_device *ibdev, u32 port,
				  struct ib_port_immutable *immutable)
{
	immutable->pkey_tbl_len = 1;
	immutable->gid_tbl_len = SIM_GID_TABLE;
	immutable->core_cap_flags = to_sim_ib(ibdev)->ib_link ?
		RDMA_CORE_PORT_IBA_IB : RDMA_CORE_PORT_IBA_ROCE_UDP_ENCAP;
	immutable->max_mad_size = IB_MGMT_MAD_SIZE;
	return 0;
}

static enum rdma_link_layer sim_get_link_layer(struct ib_device *ibdev, u32 port)
{
	return to_sim_ib(ibdev)->ib_link ? IB_LINK_LAYER_INFINIBAND : IB_LINK_LAYER_ETHERNET;
}

static void sim_get_fw(struct ib_device *ibdev, char *str)
{
	strscpy(str, "rdmasim.1", IB_FW_VERSION_NAME_MAX);
}

/* Asked on InfiniBand links only; RoCE GIDs are ib_core's own table. */
static int sim_query_gid(struct ib_device *ibdev, u32 port, int index, union ib_gid *gid)
{
	memset(gid, 0, sizeof(*gid));
	if (index)
		return 0;
	gid->global.subnet_prefix = cpu_to_be64(0xfe80000000000000ull);
	gid->global.interface_id = cpu_to_be64(be64_to_cpu(to_sim_ib(ibdev)->guid) + port - 1);
	return 0;
}

static int sim_add_gid(const struct ib_gid_attr *attr, void **context)
{
	return 0;
}

static int sim_del_gid(const struct ib_gid_attr *attr, void **context)
{
	return 0;
}

static int sim_query_pkey(struct ib_device *ibdev, u32 port, u16 index, u16 *pkey)
{
	if (index)
		return -EINVAL;
	*pkey = READ_ONCE(to_sim_ib(ibdev)->pkey);
	return 0;
}

static int sim_alloc_ucontext(struct ib_ucontext *context, struct ib_udata *udata)
{
	return 0;
}

static void sim_dealloc_ucontext(struct ib_ucontext *context)
{
}

static void sim_disassociate_ucontext(struct ib_ucontext *context)
{
}

static int sim_alloc_pd(struct ib_pd *pd, struct ib_udata *udata)
{
	return 0;
}

static int sim_dealloc_pd(struct ib_pd *pd, struct ib_udata *udata)
{
	return 0;
}

static int sim_create_ah(struct ib_ah *ah, struct rdma_ah_init_attr *attr,
			 struct ib_udata *udata)
{
	return 0;
}

static int sim_destroy_ah(struct ib_ah *ah, u32 flags)
{
	return 0;
}

static int sim_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *init,
			 struct ib_udata *udata)
{
	struct sim_qp *qp = container_of(ibqp, struct sim_qp, ibqp);

	qp->init = *init;
	INIT_LIST_HEAD(&qp->posted);
	if (init->qp_type == IB_QPT_SMI)
		ibqp->qp_num = 0;
	else if (init->qp_type == IB_QPT_GSI)
		ibqp->qp_num = 1;
	else
		ibqp->qp_num = atomic_inc_return(&to_sim_ib(ibqp->device)->next_qpn) & 0xffffff;
	return 0;
}

static int sim_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
			 struct ib_udata *udata)
{
	struct sim_qp *qp = container_of(ibqp, struct sim_qp, ibqp);

	if (!(mask & IB_QP_STATE))
		return 0;
	qp->attr.qp_state = attr->qp_state;
	/* IPoIB waits seconds for its receives when its interface goes down. */
	if (attr->qp_state == IB_QPS_ERR && ibqp->recv_cq) {
		struct sim_cq *cq = container_of(ibqp->recv_cq, struct sim_cq, ibcq);
		unsigned long flags;

		spin_lock_irqsave(&cq->lock, flags);
		list_splice_tail_init(&qp->posted, &cq->done);
		spin_unlock_irqrestore(&cq->lock, flags);
	}
	return 0;
}

static int sim_query_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
			struct ib_qp_init_attr *init)
{
	struct sim_qp *qp = container_of(ibqp, struct sim_qp, ibqp);

	*attr = qp->attr;
	*init = qp->init;
	return 0;
}

static void sim_drop_recvs(struct list_head *list, struct ib_qp *qp)
{
	struct sim_recv *recv, *next;

	list_for_each_entry_safe(recv, next, list, entry)
		if (!qp || recv->qp == qp) {
			list_del(&recv->entry);
			kfree(recv);
		}
}

static int sim_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata)
{
	struct sim_qp *qp = container_of(ibqp, struct sim_qp, ibqp);
	struct sim_cq *cq = container_of(ibqp->recv_cq, struct sim_cq, ibcq);
	unsigned long flags;

	if (!ibqp->recv_cq)
		return 0;
	spin_lock_irqsave(&cq->lock, flags);
	sim_drop_recvs(&qp->posted, NULL);
	sim_drop_recvs(&cq->done, ibqp);
	spin_unlock_irqrestore(&cq->lock, flags);
	return 0;
}

/* An error, not success: an accepted send that never completes would keep the
 * MAD agent, and so every move and removal of the device, waiting for ever.
 */
static int sim_post_send(struct ib_qp *qp, const struct ib_send_wr *wr,
			 const struct ib_send_wr **bad_wr)
{
	*bad_wr = wr;
	return -EIO;
}

/* Only UD queue pairs keep what is posted: those of ib_mad give up theirs unasked. */
static int sim_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr,
			 const struct ib_recv_wr **bad_wr)
{
	struct sim_qp *qp = container_of(ibqp, struct sim_qp, ibqp);
	struct sim_cq *cq = container_of(ibqp->recv_cq, struct sim_cq, ibcq);
	unsigned long flags;

	if (ibqp->qp_type != IB_QPT_UD || !ibqp->recv_cq)
		return 0;
	for (; wr; wr = wr->next) {
		struct sim_recv *recv = kmalloc(sizeof(*recv), GFP_ATOMIC);

		if (!recv) {
			*bad_wr = wr;
			return -ENOMEM;
		}
		recv->qp = ibqp;
		recv->wr_id = wr->wr_id;
		spin_lock_irqsave(&cq->lock, flags);
		list_add_tail(&recv->entry, &qp->posted);
		spin_unlock_irqrestore(&cq->lock, flags);
	}
	return 0;
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
static int sim_create_cq(struct ib_cq *cq, const struct ib_cq_init_attr *attr,
			 struct uverbs_attr_bundle *attrs)
#else
static int sim_create_cq(struct ib_cq *cq, const struct ib_cq_init_attr *attr,
			 struct ib_udata *udata)
#endif
{
	struct sim_cq *sim = container_of(cq, struct sim_cq, ibcq);

	cq->cqe = attr->cqe;
	spin_lock_init(&sim->lock);
	INIT_LIST_HEAD(&sim->done);
	return 0;
}

static int sim_destroy_cq(struct ib_cq *cq, struct ib_udata *udata)
{
	sim_drop_recvs(&container_of(cq, struct sim_cq, ibcq)->done, NULL);
	return 0;
}

static int sim_poll_cq(struct ib_cq *ibcq, int num_entries, struct ib_wc *wc)
{
	struct sim_cq *cq = container_of(ibcq, struct sim_cq, ibcq);
	struct sim_recv *recv;
	unsigned long flags;
	int n = 0;

	spin_lock_irqsave(&cq->lock, flags);
	for (; n < num_entries && !list_empty(&cq->done); n++) {
		recv = list_first_entry(&cq->done, struct sim_recv, entry);
		wc[n] = (struct ib_wc) {
			.wr_id = recv->wr_id, .qp = recv->qp,
			.status = IB_WC_WR_FLUSH_ERR, .opcode = IB_WC_RECV,
		};
		list_del(&recv->entry);
		kfree(recv);
	}
	spin_unlock_irqrestore(&cq->lock, flags);
	return n;
}

static int sim_req_notify_cq(struct ib_cq *cq, enum ib_cq_notify_flags flags)
{
	return 0;
}

static struct ib_mr *sim_new_mr(void)
{
	struct ib_mr *mr = kzalloc(sizeof(*mr), GFP_KERNEL);

	return mr ? mr : ERR_PTR(-ENOMEM);
}

static struct ib_mr *sim_get_dma_mr(struct ib_pd *pd, int access)
{
	return sim_new_mr();
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 17, 0)
static struct ib_mr *sim_reg_user_mr(struct ib_pd *pd, u64 start, u64 length, u64 addr,
				     int access, struct ib_dmah *dmah,
				     struct ib_udata *udata)
#else
static struct ib_mr *sim_reg_user_mr(struct ib_pd *pd, u64 start, u64 length, u64 addr,
				     int access, struct ib_udata *udata)
#endif
{
	return sim_new_mr();
}

static int sim_dereg_mr(struct ib_mr *mr, struct ib_udata *udata)
{
	kfree(mr);
	return 0;
}

/* The "arrives broken" fault: ib_core has switched the namespace already. */
static int sim_enable_driver(struct ib_device *ibdev)
{
	return -atomic_xchg(&to_sim_ib(ibdev)->enable_errno, 0);
}

static const struct ib_device_ops sim_ops = {
	.owner = THIS_MODULE,
	.uverbs_abi_ver = 2,

	.add_gid = sim_add_gid,
	.alloc_pd = sim_alloc_pd,
	.alloc_ucontext = sim_alloc_ucontext,
	.create_ah = sim_create_ah,
	.create_cq = sim_create_cq,
	.create_qp = sim_create_qp,
	.create_user_ah = sim_create_ah,
	.dealloc_pd = sim_dealloc_pd,
	.dealloc_ucontext = sim_dealloc_ucontext,
	.del_gid = sim_del_gid,
	.dereg_mr = sim_dereg_mr,
	.destroy_ah = sim_destroy_ah,
	.destroy_cq = sim_destroy_cq,
	.destroy_qp = sim_destroy_qp,
	.enable_driver = sim_enable_driver,
	.get_dev_fw_str = sim_get_fw,
	.get_dma_mr = sim_get_dma_mr,
	.get_link_layer = sim_get_link_layer,
	.get_port_immutable = sim_get_port_immutable,
	.modify_port = sim_modify_port,
	.modify_qp = sim_modify_qp,
	.poll_cq = sim_poll_cq,
	.post_recv = sim_post_recv,
	.post_send = sim_post_send,
	.query_device = sim_query_device,
	.query_gid = sim_query_gid,
	.query_pkey = sim_query_pkey,
	.query_port = sim_query_port,
	.query_qp = sim_query_qp,
	.reg_user_mr = sim_reg_user_mr,
	.req_notify_cq = sim_req_notify_cq,

	INIT_RDMA_OBJ_SIZE(ib_ah, sim_ah, ibah),
	INIT_RDMA_OBJ_SIZE(ib_cq, sim_cq, ibcq),
	INIT_RDMA_OBJ_SIZE(ib_pd, sim_pd, ibpd),
	INIT_RDMA_OBJ_SIZE(ib_qp, sim_qp, ibqp),
	INIT_RDMA_OBJ_SIZE(ib_ucontext, sim_ucontext, ibuc),
};

/* ib_core refuses to move a device whose driver lacks this one callback. */
static const struct ib_device_ops sim_movable_ops = {
	.disassociate_ucontext = sim_disassociate_ucontext,
};

/*
 * rdma-core lists no device whose driver it does not know. rdma_rxe takes every
 * device with its ID for one of its own: at an event of the device's netdev it
 * reads and writes its own structure where ours is.
 */
static const struct ib_device_ops sim_rxe_ops = {
	.driver_id = RDMA_DRIVER_RXE,
};

void sim_set_ops(struct ib_device *ibdev, bool movable, bool anonymous)
{
	ib_set_device_ops(ibdev, &sim_ops);
	if (!anonymous)
		ib_set_device_ops(ibdev, &sim_rxe_ops);
	if (movable)
		ib_set_device_ops(ibdev, &sim_movable_ops);
}
